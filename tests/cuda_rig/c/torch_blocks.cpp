// Has PyTorch's allocator tell the rig of each block that it gives to a tensor (memory.c).

#include <c10/cuda/CUDACachingAllocator.h>

extern "C" void rig_block_taken(void *pointer, size_t size);

extern "C" __attribute__((visibility("default"))) void rig_attach()
{
    using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker([](const Entry &entry) {
        if (entry.action_ == Entry::Action::ALLOC)
            rig_block_taken(reinterpret_cast<void *>(entry.addr_), entry.size_);
    });
}
