/* PyTorch's headers ask for the runtime in C++, of which torch_blocks.cpp needs the C part. */
#pragma once
#include <cuda_runtime_api.h>
