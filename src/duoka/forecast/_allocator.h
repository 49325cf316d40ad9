/* The rules of allocator.py, compiled: which block a request is given. Numbers are bytes.

   Whoever includes this sees to it that there is room before anything is added, and that only
   what is in use is given back; then free blocks stay disjoint and inside of segments. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROUND = 512,
    SMALL_REQUEST = 1 << 20,
    SMALL_SEGMENT = 2 << 20,
    LARGE_REQUEST = 10 << 20,
    LARGE_SEGMENT = 20 << 20,
    SEGMENT_ROUND = 2 << 20,
};
/* Addresses are below this one and each is given out by the device once only, so nothing larger
   is ever held, and sums and differences of such numbers are numbers still. */
#define END_OF_ADDRESSES ((int64_t)1 << 56)
/* The addresses of an expandable segment are 9/8 of the device's memory, or of this. */
#define MOST_EXPANDABLE ((int64_t)1 << 50)

/* What a function that may fail returns; NO_MEMORY is the machine's own. */
enum { DONE, FULL, NO_MEMORY, NOT_HELD, NO_SUCH };

/* ── Pairs of numbers, kept in order ──────────────────────────────────────────────────────────── */

typedef struct {
    int64_t major, minor;
} Pair;

typedef struct {
    Pair *at;
    ptrdiff_t count, room;
    ptrdiff_t guesses[256]; /* by a hash of an address: where it was found last */
} Pairs;

/* The first pair that isn't less than these two. Without branches, which can't be foreseen: what is
   compared is a number to count with, and not a condition. */
static ptrdiff_t
find(const Pairs *pairs, int64_t major, int64_t minor)
{
    const Pair *first = pairs->at;
    for (size_t count = (size_t)pairs->count, half; count > 0; count -= half) {
        half = (count + 1) / 2;
        const Pair *pair = &first[half - 1];
        first += half & -(size_t)(pair->major - major < (int64_t)(pair->minor < minor));
    }
    return first - pairs->at;
}

/* The same of pairs whose first numbers all differ, by those alone; any number may be sought. One
   step of a model is much like the one before: where an address was found last is tried first. */
static ptrdiff_t
find_address(Pairs *pairs, int64_t address)
{
    const Pair *at = pairs->at;
    ptrdiff_t *guess = &pairs->guesses[((uint64_t)address / ROUND * 0x9E3779B97F4A7C15u) >> 56];
    if (*guess > pairs->count || (*guess < pairs->count && at[*guess].major < address)
        || (*guess > 0 && at[*guess - 1].major >= address)) {
        const Pair *first = at;
        for (size_t count = (size_t)pairs->count, half; count > 0; count -= half) {
            half = (count + 1) / 2;
            first += half & -(size_t)(first[half - 1].major < address);
        }
        *guess = first - at;
    }
    return *guess;
}

/* For one more. */
static int
make_room(Pairs *pairs)
{
    if (pairs->count < pairs->room) {
        return DONE;
    }
    ptrdiff_t room = pairs->room ? 2 * pairs->room : 32;
    Pair *at = realloc(pairs->at, (size_t)room * sizeof(Pair));
    if (at == NULL) {
        return NO_MEMORY;
    }
    pairs->at = at;
    pairs->room = room;
    return DONE;
}

/* There is room. */
static void
insert_at(Pairs *pairs, ptrdiff_t index, int64_t major, int64_t minor)
{
    Pair *pair = &pairs->at[index];
    memmove(pair + 1, pair, (size_t)(pairs->count - index) * sizeof(Pair));
    *pair = (Pair){major, minor};
    pairs->count += 1;
}

static void
insert(Pairs *pairs, int64_t major, int64_t minor)
{
    insert_at(pairs, find(pairs, major, minor), major, minor);
}

static void
delete_at(Pairs *pairs, ptrdiff_t index)
{
    Pair *pair = &pairs->at[index];
    pairs->count -= 1;
    memmove(pair, pair + 1, (size_t)(pairs->count - index) * sizeof(Pair));
}

/* The two are there. */
static void
delete(Pairs *pairs, int64_t major, int64_t minor)
{
    delete_at(pairs, find(pairs, major, minor));
}

/* What is at an index becomes these two, and goes to their place. */
static void
change_at(Pairs *pairs, ptrdiff_t index, int64_t major, int64_t minor)
{
    Pair *at = pairs->at;
    ptrdiff_t place = find(pairs, major, minor);
    if (place > index) {
        place -= 1;
        memmove(&at[index], &at[index + 1], (size_t)(place - index) * sizeof(Pair));
    }
    else {
        memmove(&at[place + 1], &at[place], (size_t)(index - place) * sizeof(Pair));
    }
    at[place] = (Pair){major, minor};
}

/* ── The segments of one size class, and their free blocks ────────────────────────────────────── */

typedef struct {
    Pairs by_size;  /* of free blocks: size, address */
    Pairs by_start; /* of the same: address, size */
    Pairs segments; /* address, size */
    int64_t least_rest;
    /* Of expandable segments; there are none where a page has no bytes. */
    int64_t page;
    Pairs unmapped; /* address, size */
} Pool;

typedef struct {
    int64_t address, size, asked; /* nothing was asked where there is no block */
} Block;

static int
make_room_for_free(Pool *pool)
{
    int failed = make_room(&pool->by_size);
    return failed ? failed : make_room(&pool->by_start);
}

/* The size of what begins at an address; 0 where nothing does. */
static int64_t
size_at(Pairs *pairs, int64_t address)
{
    ptrdiff_t index = find_address(pairs, address);
    return index < pairs->count && pairs->at[index].major == address ? pairs->at[index].minor : 0;
}

/* The start of what ends at an address; the address where nothing does. */
static int64_t
start_of(Pairs *pairs, int64_t end)
{
    ptrdiff_t behind = find_address(pairs, end);
    Pair before = behind > 0 ? pairs->at[behind - 1] : (Pair){end, 0};
    return before.major + before.minor == end ? before.major : end;
}

/* The size of a free block, with what is unmapped behind it. */
static int64_t
expanded(Pool *pool, ptrdiff_t index)
{
    const Pair *free = &pool->by_size.at[index];
    return free->major + size_at(&pool->unmapped, free->minor + free->major);
}

/* The smallest free block that is large enough, split; FULL where there is none. */
static int
take_free(Pool *pool, int64_t asked, Block *block)
{
    ptrdiff_t index = find(&pool->by_size, asked, 0);
    if (index == pool->by_size.count) {
        return FULL;
    }
    while (pool->page && index + 1 < pool->by_size.count
           && expanded(pool, index + 1) < expanded(pool, index)) {
        index += 1;
    }
    int64_t size = pool->by_size.at[index].major, address = pool->by_size.at[index].minor;
    ptrdiff_t start = find_address(&pool->by_start, address);
    if (size - asked < pool->least_rest) {
        delete_at(&pool->by_size, index);
        delete_at(&pool->by_start, start);
        *block = (Block){address, size, asked};
        return DONE;
    }
    change_at(&pool->by_size, index, size - asked, address + asked);
    pool->by_start.at[start] = (Pair){address + asked, size - asked};
    *block = (Block){address, asked, asked};
    return DONE;
}

/* Whether a block is part of a segment. */
static int
is_inside(Pool *pool, const Block *block)
{
    if (block->address < 0 || block->address >= END_OF_ADDRESSES) {
        return 0;
    }
    ptrdiff_t behind = find_address(&pool->segments, block->address + 1);
    if (behind == 0) {
        return 0;
    }
    const Pair *segment = &pool->segments.at[behind - 1];
    return block->size <= segment->minor - (block->address - segment->major);
}

/* Whether no part of it is among these, of which `behind` is the first that doesn't begin before
   it. */
static int
is_apart(const Pairs *pairs, const Block *block, ptrdiff_t behind)
{
    const Pair *at = pairs->at;
    return (behind == pairs->count || at[behind].major >= block->address + block->size)
           && (behind == 0 || at[behind - 1].major + at[behind - 1].minor <= block->address);
}

/* Whether no part of it is free or unmapped, where `behind` is the first free block that doesn't
   begin before it. */
static int
is_taken(Pool *pool, const Block *block, ptrdiff_t behind)
{
    return is_apart(&pool->by_start, block, behind)
           && is_apart(&pool->unmapped, block, find_address(&pool->unmapped, block->address));
}

/* Take it back, and merge it with its free neighbours. There is room. */
static void
give_free(Pool *pool, const Block *block, ptrdiff_t behind)
{
    Pairs *by_start = &pool->by_start;
    const Pair none = {-1, 0};
    Pair merged = {block->address, block->size};
    Pair next = behind < by_start->count ? by_start->at[behind] : none;
    Pair before = behind > 0 ? by_start->at[behind - 1] : none;
    int has_next = next.major == block->address + block->size;
    int has_before = before.major + before.minor == block->address;
    if (has_next) {
        merged.minor += next.minor;
    }
    if (has_before) {
        merged = (Pair){before.major, before.minor + merged.minor};
    }
    if (has_next && has_before) {
        delete(&pool->by_size, before.minor, before.major);
    }
    if (has_next || has_before) {
        Pair old = has_next ? next : before;
        ptrdiff_t index = find(&pool->by_size, old.minor, old.major);
        change_at(&pool->by_size, index, merged.minor, merged.major);
    }
    else {
        insert(&pool->by_size, merged.minor, merged.major);
    }
    if (has_next && has_before) {
        delete_at(by_start, behind);
    }
    if (has_next || has_before) {
        by_start->at[has_before ? behind - 1 : behind] = merged;
    }
    else {
        insert_at(by_start, behind, merged.major, merged.minor);
    }
}

/* Give every wholly free segment back to the device; how many bytes that were. */
static int64_t
drop_free_segments(Pool *pool)
{
    int64_t dropped = 0;
    for (ptrdiff_t index = pool->segments.count - 1; index >= 0; index--) {
        Pair segment = pool->segments.at[index];
        ptrdiff_t start = find_address(&pool->by_start, segment.major);
        if (start < pool->by_start.count && pool->by_start.at[start].major == segment.major
            && pool->by_start.at[start].minor == segment.minor) {
            delete(&pool->by_size, segment.minor, segment.major);
            delete_at(&pool->by_start, start);
            delete_at(&pool->segments, index);
            dropped += segment.minor;
        }
    }
    return dropped;
}

/* ── Expandable segments ──────────────────────────────────────────────────────────────────────── */

/* The lowest address with so many free or unmapped bytes, at an unmapped run; -1 where none is. */
static int64_t
find_expandable(Pool *pool, int64_t asked)
{
    for (ptrdiff_t index = 0; index < pool->unmapped.count; index++) {
        int64_t start = start_of(&pool->by_start, pool->unmapped.at[index].major);
        for (int64_t end = start, more = 1; more; end += more) {
            if (end >= start + asked) {
                return start;
            }
            more = size_at(&pool->by_start, end);
            more = more ? more : size_at(&pool->unmapped, end);
        }
    }
    return -1;
}

/* The bytes to map next behind the free block at `start`, for a block of so many; 0 once it is as
   large. */
static int64_t
missing_pages(Pool *pool, int64_t start, int64_t asked)
{
    int64_t free = size_at(&pool->by_start, start);
    int64_t missing = asked - free, run = size_at(&pool->unmapped, start + free);
    missing = missing < run ? missing : run;
    return missing <= 0 ? 0 : (missing + pool->page - 1) / pool->page * pool->page;
}

/* The first bytes of an unmapped run become free. There is room. */
static void
map_pages(Pool *pool, int64_t address, int64_t size)
{
    ptrdiff_t index = find_address(&pool->unmapped, address);
    Pair *run = &pool->unmapped.at[index];
    *run = (Pair){run->major + size, run->minor - size};
    if (run->minor == 0) {
        delete_at(&pool->unmapped, index);
    }
    Block block = {address, size, size};
    give_free(pool, &block, find_address(&pool->by_start, address));
}

/* A run becomes unmapped, and merges with its unmapped neighbours; a segment that is wholly unmapped
   then is gone. There is room. */
static void
add_unmapped(Pool *pool, int64_t start, int64_t end)
{
    Pairs *unmapped = &pool->unmapped;
    int64_t more = size_at(unmapped, end), first = start_of(unmapped, start);
    if (more) {
        delete_at(unmapped, find_address(unmapped, end));
    }
    if (first < start) {
        delete_at(unmapped, find_address(unmapped, first));
    }
    if (size_at(&pool->segments, first) == end + more - first) {
        delete_at(&pool->segments, find_address(&pool->segments, first));
    }
    else {
        insert_at(unmapped, find_address(unmapped, first), first, end + more - first);
    }
}

/* Unmap every wholly free page; `reserved` is less for it. */
static int
unmap_free(Pool *pool, long long *reserved)
{
    for (ptrdiff_t index = pool->by_start.count - 1; index >= 0; index--) {
        Pair free = pool->by_start.at[index];
        int64_t end = free.major + free.minor;
        int64_t first = (free.major + pool->page - 1) / pool->page * pool->page;
        int64_t last = end / pool->page * pool->page;
        if (first >= last) {
            continue;
        }
        if (make_room(&pool->unmapped) || make_room_for_free(pool)) {
            return NO_MEMORY;
        }
        delete(&pool->by_size, free.minor, free.major);
        delete_at(&pool->by_start, index);
        if (last < end) {
            insert_at(&pool->by_start, index, last, end - last);
            insert(&pool->by_size, end - last, last);
        }
        if (free.major < first) {
            insert_at(&pool->by_start, index, free.major, first - free.major);
            insert(&pool->by_size, first - free.major, free.major);
        }
        add_unmapped(pool, first, last);
        *reserved -= last - first;
    }
    return DONE;
}

static void
clear_pool(Pool *pool)
{
    free(pool->by_size.at);
    free(pool->by_start.at);
    free(pool->segments.at);
    free(pool->unmapped.at);
}
