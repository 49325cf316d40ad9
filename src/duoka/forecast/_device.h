/* A device, compiled: the segments of both size classes, and what is reserved of its memory. */

#include "_allocator.h"

typedef struct {
    Pool small, large;
    int64_t capacity, next_address;
    long long reserved, max_reserved;
    int64_t refused; /* the last request that was */
    char is_pressed;
} Device;

static Pool *
pool_of(Device *device, int64_t size)
{
    /* A block of the large pool is always larger than one of the small pool. */
    return size <= SMALL_REQUEST ? &device->small : &device->large;
}

static int64_t
rounded(int64_t num_bytes, int64_t multiple)
{
    return (num_bytes + multiple - 1) / multiple * multiple;
}

/* Take bytes from the device. */
static int
count_reserved(Device *device, int64_t num_bytes)
{
    if (device->reserved + num_bytes > device->capacity) {
        return FULL;
    }
    device->reserved += num_bytes;
    if (device->reserved > device->max_reserved) {
        device->max_reserved = device->reserved;
    }
    return DONE;
}

static int
add_segment(Device *device, Pool *pool, int64_t asked)
{
    int64_t segment = asked <= SMALL_REQUEST  ? SMALL_SEGMENT
                      : asked < LARGE_REQUEST ? LARGE_SEGMENT
                                              : rounded(asked, SEGMENT_ROUND);
    if (make_room(&pool->segments) || make_room_for_free(pool)) {
        return NO_MEMORY;
    }
    if (device->next_address + segment > END_OF_ADDRESSES || count_reserved(device, segment)) {
        return FULL;
    }
    insert(&pool->segments, device->next_address, segment);
    insert(&pool->by_start, device->next_address, segment);
    insert(&pool->by_size, segment, device->next_address);
    /* Segments don't merge, so they don't touch. */
    device->next_address += segment + ROUND;
    return DONE;
}

/* An expandable segment, unmapped yet, for so many bytes; FULL where there are no addresses. */
static int
add_expandable(Device *device, Pool *pool, int64_t asked)
{
    int64_t most = device->capacity && device->capacity < MOST_EXPANDABLE ? device->capacity
                                                                          : MOST_EXPANDABLE;
    int64_t segment = most > 0 ? rounded(most + most / 8, pool->page) : 0;
    int64_t start = device->next_address;
    if (asked > segment || start + segment > END_OF_ADDRESSES) {
        return FULL;
    }
    if (make_room(&pool->segments) || make_room(&pool->unmapped)) {
        return NO_MEMORY;
    }
    insert(&pool->segments, start, segment);
    insert(&pool->unmapped, start, segment);
    /* The next one is aligned to any page, and doesn't touch. */
    device->next_address += (segment / LARGE_SEGMENT + 1) * LARGE_SEGMENT;
    return DONE;
}

/* Map pages until so many bytes are free in a row. Pages that fit stay where later ones don't. */
static int
expand(Device *device, Pool *pool, int64_t asked)
{
    int64_t start = find_expandable(pool, asked);
    if (start < 0) {
        start = device->next_address;
        int failed = add_expandable(device, pool, asked);
        if (failed) {
            return failed;
        }
    }
    for (int64_t pages; (pages = missing_pages(pool, start, asked));) {
        if (make_room_for_free(pool)) {
            return NO_MEMORY;
        }
        if (count_reserved(device, pages)) {
            return FULL;
        }
        map_pages(pool, start + size_at(&pool->by_start, start), pages);
    }
    return DONE;
}

static int
return_cached(Device *device)
{
    if (device->small.page) {
        int failed = unmap_free(&device->small, &device->reserved);
        return failed ? failed : unmap_free(&device->large, &device->reserved);
    }
    device->reserved -= drop_free_segments(&device->small);
    device->reserved -= drop_free_segments(&device->large);
    return DONE;
}

static int
reserve(Device *device, Pool *pool, int64_t asked)
{
    int (*extend)(Device *, Pool *, int64_t) = pool->page ? expand : add_segment;
    int failed = extend(device, pool, asked);
    if (failed == FULL) {
        device->is_pressed = 1;
        failed = return_cached(device);
        failed = failed ? failed : extend(device, pool, asked);
    }
    if (failed == FULL) {
        device->refused = asked;
    }
    return failed;
}
