/* One device's memory, compiled: what playing.PlainMemory is, by the same rules.

   Those of allocator.py decide which block a request is given. Numbers are bytes. Nothing here
   knows of tensors, blocks of a model or steps: a program says what is taken and given back. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
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
/* Larger than any memory, and small enough that a sum of two is a number still. */
#define MOST_BYTES ((int64_t)1 << 60)

/* What a function that may fail returns; NO_MEMORY is the machine's own. */
enum { DONE, FULL, NO_MEMORY };

/* ── Pairs of numbers, kept in order ──────────────────────────────────────────────────────────── */

typedef struct {
    int64_t major, minor;
} Pair;

typedef struct {
    Pair *at;
    Py_ssize_t count, room;
} Pairs;

/* The first pair that isn't less than these two. */
static Py_ssize_t
find(const Pairs *pairs, int64_t major, int64_t minor)
{
    Py_ssize_t low = 0, high = pairs->count;
    while (low < high) {
        Py_ssize_t middle = (low + high) / 2;
        const Pair *pair = &pairs->at[middle];
        if (pair->major < major || (pair->major == major && pair->minor < minor)) {
            low = middle + 1;
        }
        else {
            high = middle;
        }
    }
    return low;
}

static int
insert(Pairs *pairs, int64_t major, int64_t minor)
{
    if (pairs->count == pairs->room) {
        Py_ssize_t room = pairs->room ? 2 * pairs->room : 32;
        Pair *at = realloc(pairs->at, (size_t)room * sizeof(Pair));
        if (at == NULL) {
            return NO_MEMORY;
        }
        pairs->at = at;
        pairs->room = room;
    }
    Py_ssize_t index = find(pairs, major, minor);
    Pair *pair = &pairs->at[index];
    memmove(pair + 1, pair, (size_t)(pairs->count - index) * sizeof(Pair));
    pair->major = major;
    pair->minor = minor;
    pairs->count += 1;
    return DONE;
}

static void
delete_at(Pairs *pairs, Py_ssize_t index)
{
    Pair *pair = &pairs->at[index];
    pairs->count -= 1;
    memmove(pair, pair + 1, (size_t)(pairs->count - index) * sizeof(Pair));
}

/* ── The segments of one size class, and their free blocks ────────────────────────────────────── */

typedef struct {
    Pairs by_size;  /* of free blocks: size, address */
    Pairs by_start; /* of the same: address, size */
    Pairs segments; /* address, size */
    int64_t least_rest;
} Pool;

typedef struct {
    int64_t address, size, asked; /* nothing was asked where there is no block */
} Block;

static int
add_free(Pool *pool, int64_t address, int64_t size)
{
    int failed = insert(&pool->by_size, size, address);
    return failed ? failed : insert(&pool->by_start, address, size);
}

static void
delete_free(Pool *pool, int64_t address, int64_t size)
{
    delete_at(&pool->by_size, find(&pool->by_size, size, address));
    delete_at(&pool->by_start, find(&pool->by_start, address, 0));
}

/* The smallest free block that is large enough, split; FULL where there is none. */
static int
take_free(Pool *pool, int64_t asked, Block *block)
{
    Py_ssize_t index = find(&pool->by_size, asked, 0);
    if (index == pool->by_size.count) {
        return FULL;
    }
    Pair found = pool->by_size.at[index];
    int64_t rest = found.major - asked;
    delete_free(pool, found.minor, found.major);
    block->address = found.minor;
    if (rest < pool->least_rest) {
        block->size = found.major;
        return DONE;
    }
    block->size = asked;
    return add_free(pool, found.minor + asked, rest);
}

/* Take a block back, and merge it with its free neighbours. */
static int
give_free(Pool *pool, int64_t address, int64_t size)
{
    Py_ssize_t behind = find(&pool->by_start, address, 0);
    if (behind < pool->by_start.count && pool->by_start.at[behind].major == address + size) {
        Pair next = pool->by_start.at[behind];
        delete_free(pool, next.major, next.minor);
        size += next.minor;
    }
    if (behind > 0) {
        Pair before = pool->by_start.at[behind - 1];
        if (before.major + before.minor == address) {
            delete_free(pool, before.major, before.minor);
            address = before.major;
            size += before.minor;
        }
    }
    return add_free(pool, address, size);
}

/* Give every wholly free segment back to the device; how many bytes that were. */
static int64_t
drop_free_segments(Pool *pool)
{
    int64_t dropped = 0;
    for (Py_ssize_t index = pool->segments.count - 1; index >= 0; index--) {
        Pair segment = pool->segments.at[index];
        Py_ssize_t start = find(&pool->by_start, segment.major, 0);
        if (start < pool->by_start.count && pool->by_start.at[start].major == segment.major
            && pool->by_start.at[start].minor == segment.minor) {
            delete_free(pool, segment.major, segment.minor);
            delete_at(&pool->segments, index);
            dropped += segment.minor;
        }
    }
    return dropped;
}

static void
clear_pool(Pool *pool)
{
    free(pool->by_size.at);
    free(pool->by_start.at);
    free(pool->segments.at);
}

/* ── A device's memory ────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    Pool small, large;
    int64_t capacity, next_address;
    long long reserved, max_reserved;
    long long allocated, requested, cached, aside;
    long long peak, requested_peak, cached_at_peak, aside_at_peak;
    char is_pressed;
    Block *slots; /* of the program that runs */
    Py_ssize_t num_slots;
} Memory;

static Pool *
pool_of(Memory *memory, int64_t size)
{
    /* A block of the large pool is always larger than one of the small pool. */
    return size <= SMALL_REQUEST ? &memory->small : &memory->large;
}

static int
reserve(Memory *memory, Pool *pool, int64_t asked)
{
    int64_t segment = (asked + SEGMENT_ROUND - 1) / SEGMENT_ROUND * SEGMENT_ROUND;
    if (asked <= SMALL_REQUEST) {
        segment = SMALL_SEGMENT;
    }
    else if (asked < LARGE_REQUEST) {
        segment = LARGE_SEGMENT;
    }
    if (memory->reserved + segment > memory->capacity) {
        memory->is_pressed = 1;
        memory->reserved -= drop_free_segments(&memory->small);
        memory->reserved -= drop_free_segments(&memory->large);
        if (memory->reserved + segment > memory->capacity) {
            return FULL;
        }
    }
    if (insert(&pool->segments, memory->next_address, segment)) {
        return NO_MEMORY;
    }
    int failed = add_free(pool, memory->next_address, segment);
    /* Segments don't merge, so they don't touch. */
    memory->next_address += segment + ROUND;
    memory->reserved += segment;
    if (memory->reserved > memory->max_reserved) {
        memory->max_reserved = memory->reserved;
    }
    return failed;
}

static int
take(Memory *memory, int64_t num_bytes, int is_cached, Block *block)
{
    int64_t asked = num_bytes <= ROUND ? ROUND : (num_bytes + ROUND - 1) / ROUND * ROUND;
    Pool *pool = pool_of(memory, asked);
    block->asked = asked;
    int failed = take_free(pool, asked, block);
    if (failed == FULL) {
        failed = reserve(memory, pool, asked);
        failed = failed ? failed : take_free(pool, asked, block);
    }
    if (failed) {
        return failed;
    }
    memory->requested += asked;
    memory->allocated += block->size;
    memory->cached += is_cached ? block->size : 0;
    if (memory->requested > memory->requested_peak) {
        memory->requested_peak = memory->requested;
    }
    if (memory->allocated >= memory->peak) {
        memory->peak = memory->allocated;
        memory->cached_at_peak = memory->cached;
        memory->aside_at_peak = memory->aside;
    }
    return DONE;
}

static int
give(Memory *memory, const Block *block, int is_cached)
{
    memory->requested -= block->asked;
    memory->allocated -= block->size;
    memory->cached -= is_cached ? block->size : 0;
    return give_free(pool_of(memory, block->size), block->address, block->size);
}

/* ── For Python ───────────────────────────────────────────────────────────────────────────────── */

static PyObject *
held_of(const Block *block)
{
    return Py_BuildValue("(LLL)", (long long)block->address, (long long)block->size,
                         (long long)block->asked);
}

/* 0, or -1 with an exception: what comes from Python is what held_of made. */
static int
read_held(PyObject *held, Block *block)
{
    long long address, size, asked;
    if (!PyTuple_Check(held)) {
        PyErr_SetString(PyExc_TypeError, "a block is a tuple of three numbers");
        return -1;
    }
    if (!PyArg_ParseTuple(held, "LLL", &address, &size, &asked)) {
        return -1;
    }
    block->address = address;
    block->size = size;
    block->asked = asked;
    return 0;
}

static PyObject *
memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity_bytes", NULL};
    PyObject *capacity = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", names, &capacity)) {
        return NULL;
    }
    long long most = MOST_BYTES;
    if (capacity != Py_None) {
        most = PyLong_AsLongLong(capacity);
        if (most == -1 && PyErr_Occurred()) {
            return NULL;
        }
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Memory *self = (Memory *)alloc(type, 0);
    if (self != NULL) {
        self->capacity = most < MOST_BYTES ? most : MOST_BYTES;
        self->small.least_rest = ROUND;
        self->large.least_rest = SMALL_REQUEST + ROUND;
    }
    return (PyObject *)self;
}

static void
memory_dealloc(Memory *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    clear_pool(&self->small);
    clear_pool(&self->large);
    free(self->slots);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* allocator.OutOfCapacity */
static PyObject *out_of_capacity;

static PyObject *
raise(const Memory *memory, int failed, const Block *block)
{
    if (failed == NO_MEMORY) {
        return PyErr_NoMemory();
    }
    PyObject *numbers = Py_BuildValue("(LLLL)", (long long)block->asked,
                                      (long long)memory->capacity, memory->allocated,
                                      memory->reserved);
    if (numbers != NULL) {
        PyErr_SetObject(out_of_capacity, numbers);
        Py_DECREF(numbers);
    }
    return NULL;
}

static PyObject *
memory_hold(Memory *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"num_bytes", "cached", NULL};
    long long num_bytes;
    int is_cached = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "L|p", names, &num_bytes, &is_cached)) {
        return NULL;
    }
    Block block = {.asked = num_bytes};
    int failed = num_bytes > MOST_BYTES ? FULL : take(self, num_bytes, is_cached, &block);
    return failed ? raise(self, failed, &block) : held_of(&block);
}

static PyObject *
memory_release(Memory *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"held", "cached", NULL};
    PyObject *held;
    int is_cached = 0;
    Block block;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p", names, &held, &is_cached)
        || read_held(held, &block)) {
        return NULL;
    }
    if (give(self, &block, is_cached)) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

/* Room for so many slots, the first ones with what is given. */
static int
fill_slots(Memory *self, Py_ssize_t num_slots, PyObject *given)
{
    Py_ssize_t num_given = PyList_Size(given);
    if (num_given < 0) {
        return -1;
    }
    if (num_given > num_slots) {
        PyErr_SetString(PyExc_ValueError, "more is given than there are slots");
        return -1;
    }
    if (num_slots > self->num_slots) {
        Block *slots = realloc(self->slots, (size_t)num_slots * sizeof(Block));
        if (slots == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        self->slots = slots;
        self->num_slots = num_slots;
    }
    if (num_slots) {
        memset(self->slots, 0, (size_t)num_slots * sizeof(Block));
    }
    for (Py_ssize_t index = 0; index < num_given; index++) {
        PyObject *held = PyList_GetItem(given, index);
        if (held != Py_None && read_held(held, &self->slots[index])) {
            return -1;
        }
    }
    return 0;
}

typedef struct {
    int64_t slot, size, is_cached; /* the index of the size; -1 gives back what is in the slot */
} Move;

static PyObject *
memory_run(Memory *self, PyObject *args)
{
    const char *program, *numbers;
    Py_ssize_t program_bytes, sizes_bytes, num_slots;
    PyObject *given, *out;
    if (!PyArg_ParseTuple(args, "y#y#nOO", &program, &program_bytes, &numbers, &sizes_bytes,
                          &num_slots, &given, &out)
        || fill_slots(self, num_slots, given)) {
        return NULL;
    }
    Py_ssize_t num_sizes = sizes_bytes / (Py_ssize_t)sizeof(int64_t);
    Py_ssize_t num_moves = program_bytes / (Py_ssize_t)sizeof(Move);
    for (Py_ssize_t index = 0; index < num_moves; index++) {
        Move move;
        memcpy(&move, program + index * (Py_ssize_t)sizeof(Move), sizeof(Move));
        if (move.slot < 0 || move.slot >= num_slots || move.size >= num_sizes) {
            PyErr_SetString(PyExc_ValueError, "a program names a slot or a size that isn't there");
            return NULL;
        }
        Block *block = &self->slots[move.slot];
        int failed = DONE;
        int64_t size = 0;
        if (move.size >= 0) {
            memcpy(&size, numbers + move.size * (Py_ssize_t)sizeof(int64_t), sizeof(size));
            failed = size > MOST_BYTES ? FULL : take(self, size, move.is_cached != 0, block);
        }
        else if (block->asked) {
            failed = give(self, block, move.is_cached != 0);
        }
        if (failed) {
            return raise(self, failed, block);
        }
    }
    Py_ssize_t num_out = PyTuple_Size(out);
    PyObject *found = num_out < 0 ? NULL : PyList_New(num_out);
    for (Py_ssize_t index = 0; found != NULL && index < num_out; index++) {
        Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GetItem(out, index));
        if (slot < 0 || slot >= num_slots) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "there is no such slot");
            }
            Py_CLEAR(found);
            break;
        }
        PyObject *held = held_of(&self->slots[slot]);
        if (held == NULL || PyList_SetItem(found, index, held)) {
            Py_CLEAR(found);
        }
    }
    return found;
}

static PyObject *
memory_free_blocks(Memory *self, PyObject *Py_UNUSED(ignored))
{
    const Pairs *small = &self->small.by_start, *large = &self->large.by_start;
    const Py_ssize_t size = (Py_ssize_t)sizeof(Pair);
    return Py_BuildValue("(y#y#)", small->count ? (char *)small->at : "", small->count * size,
                         large->count ? (char *)large->at : "", large->count * size);
}

static PyMethodDef memory_methods[] = {
    {"hold", (PyCFunction)(void (*)(void))memory_hold, METH_VARARGS | METH_KEYWORDS, NULL},
    {"release", (PyCFunction)(void (*)(void))memory_release, METH_VARARGS | METH_KEYWORDS, NULL},
    {"run", (PyCFunction)memory_run, METH_VARARGS, NULL},
    {"free_blocks", (PyCFunction)memory_free_blocks, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

#define NUMBER(name, flags) {#name, T_LONGLONG, offsetof(Memory, name), flags, NULL}

static PyMemberDef memory_members[] = {
    NUMBER(reserved, READONLY),
    NUMBER(max_reserved, READONLY),
    NUMBER(allocated, READONLY),
    NUMBER(requested, READONLY),
    NUMBER(cached, READONLY),
    NUMBER(aside, 0),
    NUMBER(peak, READONLY),
    NUMBER(requested_peak, READONLY),
    NUMBER(cached_at_peak, READONLY),
    NUMBER(aside_at_peak, READONLY),
    {"is_pressed", T_BOOL, offsetof(Memory, is_pressed), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot memory_slots[] = {
    {Py_tp_new, memory_new},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_methods, memory_methods},
    {Py_tp_members, memory_members},
    {0, NULL},
};

static PyType_Spec memory_spec = {
    .name = "duoka._memory.Memory",
    .basicsize = sizeof(Memory),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = memory_slots,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "duoka._memory",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__memory(void)
{
    PyObject *allocator = PyImport_ImportModule("duoka.allocator");
    if (allocator == NULL) {
        return NULL;
    }
    out_of_capacity = PyObject_GetAttrString(allocator, "OutOfCapacity");
    Py_DECREF(allocator);
    PyObject *type = out_of_capacity == NULL ? NULL : PyType_FromSpec(&memory_spec);
    PyObject *module = type == NULL ? NULL : PyModule_Create(&definition);
    if (module != NULL && PyModule_AddObjectRef(module, "Memory", type)) {
        Py_CLEAR(module);
    }
    Py_XDECREF(type);
    return module;
}
