/* One device's memory, compiled: what device_memory.PlainMemory is.

   Numbers are bytes. Nothing here knows of tensors, blocks of a model or steps: a program says
   what is taken and given back. Whatever is passed in, no number leaves its range: what would
   change that is refused before anything is changed. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "_device.h"

/* ── A device's memory ────────────────────────────────────────────────────────────────────────── */

typedef struct {
    PyObject_HEAD
    Device device;
    long long allocated, requested, cached, aside;
    long long peak, requested_peak, cached_at_peak, aside_at_peak;
} Memory;

static int
take(Memory *memory, int64_t num_bytes, int is_cached, Block *block)
{
    int64_t asked = num_bytes <= ROUND             ? ROUND
                    : num_bytes > END_OF_ADDRESSES ? END_OF_ADDRESSES + ROUND /* too many */
                                                   : rounded(num_bytes, ROUND);
    Pool *pool = pool_of(&memory->device, asked);
    int failed = take_free(pool, asked, block);
    if (failed == FULL) {
        failed = reserve(&memory->device, pool, asked);
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
    Pool *pool = pool_of(&memory->device, block->size);
    if (block->asked <= 0 || block->asked > block->size || !is_inside(pool, block)) {
        return NOT_HELD;
    }
    ptrdiff_t behind = find_address(&pool->by_start, block->address);
    int64_t allocated = memory->allocated - block->size;
    int64_t requested = memory->requested - block->asked;
    int64_t cached = memory->cached - (is_cached ? block->size : 0);
    if (!is_taken(pool, block, behind) || requested < 0 || requested > allocated || cached < 0
        || cached > allocated) {
        return NOT_HELD;
    }
    if (make_room_for_free(pool)) {
        return NO_MEMORY;
    }
    give_free(pool, block, behind);
    memory->allocated = allocated;
    memory->requested = requested;
    memory->cached = cached;
    return DONE;
}

/* ── A program ────────────────────────────────────────────────────────────────────────────────── */

typedef struct {
    int64_t slot, size, is_cached; /* the index of the size, or BACK */
} Move;

enum { BACK = -1 };

typedef struct {
    const char *moves; /* numbers may begin at any byte */
    const char *sizes;
    Py_ssize_t num_moves, num_sizes, num_slots;
    Block *slots;
} Program;

static int
run_program(Memory *memory, const Program *program)
{
    int failed = DONE;
    for (Py_ssize_t index = 0; !failed && index < program->num_moves; index++) {
        Move move;
        memcpy(&move, program->moves + index * (Py_ssize_t)sizeof(Move), sizeof(Move));
        if (move.slot < 0 || move.slot >= program->num_slots || move.size < BACK
            || move.size >= program->num_sizes) {
            return NO_SUCH;
        }
        Block *block = &program->slots[move.slot];
        if (move.size != BACK) {
            int64_t size;
            memcpy(&size, program->sizes + move.size * (Py_ssize_t)sizeof(size), sizeof(size));
            failed = take(memory, size, move.is_cached != 0, block);
        }
        else if (block->asked) {
            failed = give(memory, block, move.is_cached != 0);
            block->asked = 0;
        }
    }
    return failed;
}

/* ── For Python ───────────────────────────────────────────────────────────────────────────────── */

/* allocator.OutOfCapacity */
static PyObject *out_of_capacity;

static PyObject *
refuse(const Memory *memory, int failed)
{
    if (failed == NO_MEMORY) {
        return PyErr_NoMemory();
    }
    if (failed == FULL) {
        PyObject *numbers = Py_BuildValue("(LLLL)", (long long)memory->device.refused,
                                          (long long)memory->device.capacity, memory->allocated,
                                          memory->device.reserved);
        if (numbers != NULL) {
            PyErr_SetObject(out_of_capacity, numbers);
            Py_DECREF(numbers);
        }
        return NULL;
    }
    PyErr_SetString(PyExc_ValueError,
                    failed == NOT_HELD ? "what is given back isn't in use, or not as that"
                                       : "there is no such slot or size");
    return NULL;
}

static PyObject *
held_of(const Block *block)
{
    return Py_BuildValue("(LLL)", (long long)block->address, (long long)block->size,
                         (long long)block->asked);
}

/* 0, or -1 with an exception. Runs no code of Python's, so nothing changes meanwhile. */
static int
read_held(PyObject *held, Block *block)
{
    long long numbers[3];
    int is_tuple = PyTuple_Check(held) && PyTuple_Size(held) == 3;
    for (Py_ssize_t index = 0; index < 3; index++) {
        PyObject *number = is_tuple ? PyTuple_GetItem(held, index) : NULL;
        if (number == NULL || !PyLong_Check(number)) {
            PyErr_SetString(PyExc_TypeError, "a block is a tuple of three integers");
            return -1;
        }
        numbers[index] = PyLong_AsLongLong(number);
        if (numbers[index] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    *block = (Block){numbers[0], numbers[1], numbers[2]};
    return 0;
}

/* For "O&": an integer as large as it can be here. */
static int
read_bytes(PyObject *number, void *num_bytes)
{
    int overflow;
    long long found = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (found == -1 && PyErr_Occurred()) {
        return 0;
    }
    *(int64_t *)num_bytes = overflow > 0 ? INT64_MAX : overflow < 0 ? INT64_MIN : found;
    return 1;
}

/* For "O&": the same, or None for as much as there is. */
static int
read_capacity(PyObject *number, void *capacity)
{
    return number == Py_None || read_bytes(number, capacity);
}

static PyObject *
memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity_bytes", "expandable", NULL};
    int64_t capacity = END_OF_ADDRESSES;
    int is_expandable = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&p", names, read_capacity, &capacity,
                                     &is_expandable)) {
        return NULL;
    }
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *self = alloc(type, 0);
    if (self != NULL) {
        Device *device = &((Memory *)self)->device;
        device->capacity = capacity;
        device->small.least_rest = ROUND;
        device->large.least_rest = is_expandable ? ROUND : SMALL_REQUEST + ROUND;
        device->small.page = is_expandable ? SMALL_SEGMENT : 0;
        device->large.page = is_expandable ? LARGE_SEGMENT : 0;
    }
    return self;
}

static void
memory_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    clear_pool(&((Memory *)self)->device.small);
    clear_pool(&((Memory *)self)->device.large);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyObject *
memory_hold(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"num_bytes", "cached", NULL};
    int64_t num_bytes;
    int is_cached = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|p", names, read_bytes, &num_bytes,
                                     &is_cached)) {
        return NULL;
    }
    Block block;
    int failed = take((Memory *)self, num_bytes, is_cached, &block);
    return failed ? refuse((Memory *)self, failed) : held_of(&block);
}

static PyObject *
memory_release(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"block", "cached", NULL};
    PyObject *held;
    int is_cached = 0;
    Block block;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|p", names, &held, &is_cached)
        || read_held(held, &block)) {
        return NULL;
    }
    int failed = give((Memory *)self, &block, is_cached);
    return failed ? refuse((Memory *)self, failed) : Py_NewRef(Py_None);
}

/* 0, or -1 with an exception. */
static int
read_given(PyObject *given, Py_ssize_t num_given, Block *slots)
{
    for (Py_ssize_t index = 0; index < num_given; index++) {
        PyObject *held = PyList_GetItem(given, index);
        if (held == NULL || read_held(held, &slots[index])) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
found_in(const Program *program, PyObject *out)
{
    Py_ssize_t num_out = PyTuple_Size(out);
    PyObject *found = PyList_New(num_out);
    for (Py_ssize_t index = 0; found != NULL && index < num_out; index++) {
        Py_ssize_t slot = PyLong_AsSsize_t(PyTuple_GetItem(out, index));
        PyObject *held = NULL;
        if (slot >= 0 && slot < program->num_slots && program->slots[slot].asked) {
            held = held_of(&program->slots[slot]);
        }
        else if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "there is nothing in a slot that is wanted");
        }
        if (held == NULL || PyList_SetItem(found, index, held)) {
            Py_CLEAR(found);
        }
    }
    return found;
}

static PyObject *
memory_run(PyObject *self, PyObject *args)
{
    Program program;
    Py_ssize_t moves_bytes, sizes_bytes;
    PyObject *given, *out;
    if (!PyArg_ParseTuple(args, "y#y#O!O!", &program.moves, &moves_bytes, &program.sizes,
                          &sizes_bytes, &PyList_Type, &given, &PyTuple_Type, &out)) {
        return NULL;
    }
    if (moves_bytes % (Py_ssize_t)sizeof(Move) || sizes_bytes % (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "a program or its sizes end within a number");
        return NULL;
    }
    Py_ssize_t num_given = PyList_Size(given);
    program.num_moves = moves_bytes / (Py_ssize_t)sizeof(Move);
    program.num_sizes = sizes_bytes / (Py_ssize_t)sizeof(int64_t);
    program.num_slots = num_given + program.num_moves; /* as many as can be of use */
    program.slots = calloc((size_t)program.num_slots + 1, sizeof(Block));
    if (program.slots == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *found = NULL;
    if (!read_given(given, num_given, program.slots)) {
        int failed = run_program((Memory *)self, &program);
        found = failed ? refuse((Memory *)self, failed) : found_in(&program, out);
    }
    free(program.slots);
    return found;
}

static PyObject *
memory_free_blocks(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const Device *device = &((Memory *)self)->device;
    const Pairs *pairs[] = {&device->small.by_start, &device->large.by_start,
                            &device->small.unmapped, &device->large.unmapped};
    Py_ssize_t num_pairs = device->small.page ? 4 : 2;
    PyObject *found = PyTuple_New(num_pairs);
    for (Py_ssize_t index = 0; found != NULL && index < num_pairs; index++) {
        const Pairs *each = pairs[index];
        const char *at = each->count ? (const char *)each->at : "";
        PyObject *bytes =
            PyBytes_FromStringAndSize(at, each->count * (Py_ssize_t)sizeof(Pair));
        if (bytes == NULL || PyTuple_SetItem(found, index, bytes)) {
            Py_CLEAR(found);
        }
    }
    return found;
}

static PyMethodDef memory_methods[] = {
    {"hold", (PyCFunction)(void (*)(void))memory_hold, METH_VARARGS | METH_KEYWORDS, NULL},
    {"release", (PyCFunction)(void (*)(void))memory_release, METH_VARARGS | METH_KEYWORDS, NULL},
    {"run", memory_run, METH_VARARGS, NULL},
    {"free_blocks", memory_free_blocks, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

#define NUMBER(name, flags) {#name, T_LONGLONG, offsetof(Memory, name), flags, NULL}

static PyMemberDef memory_members[] = {
    {"max_reserved", T_LONGLONG, offsetof(Memory, device.max_reserved), READONLY, NULL},
    NUMBER(allocated, READONLY),
    NUMBER(requested, READONLY),
    NUMBER(cached, READONLY),
    NUMBER(aside, 0),
    NUMBER(peak, READONLY),
    NUMBER(requested_peak, READONLY),
    NUMBER(cached_at_peak, READONLY),
    NUMBER(aside_at_peak, READONLY),
    {"is_pressed", T_BOOL, offsetof(Memory, device.is_pressed), READONLY, NULL},
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
    .name = "duoka.forecast._memory.Memory",
    .basicsize = sizeof(Memory),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = memory_slots,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "duoka.forecast._memory",
    .m_size = -1,
};

PyMODINIT_FUNC
PyInit__memory(void)
{
    PyObject *allocator = PyImport_ImportModule("duoka.forecast.allocator");
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
