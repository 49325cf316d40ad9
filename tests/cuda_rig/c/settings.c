/* What the environment says of the GPUs; README.md lists the variables. */

#include "rig.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

Gpu rig_gpus[MAX_GPUS];
int rig_num_gpus, rig_num_visible, rig_has_started;
Settings rig_settings;
pthread_mutex_t rig_lock = PTHREAD_MUTEX_INITIALIZER;
__thread int rig_current;

static int visible[MAX_GPUS]; /* CUDA's number of a GPU -> its place in rig_gpus */
static FILE *log_file;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static const char *
setting(const char *name, const char *otherwise)
{
    const char *value = getenv(name);
    return value && *value ? value : otherwise;
}

static void
refuse(const char *name, const char *expected)
{
    fprintf(stderr, "cuda_rig: %s=%s can't be read; it takes %s\n", name, getenv(name), expected);
    exit(2);
}

/* A size with its unit; moves on behind it, or leaves the place where there is none. */
static size_t
read_bytes(const char **text)
{
    static const struct {
        const char *name;
        size_t size;
    } units[] = {{"GiB", GIB}, {"MiB", MIB}, {"KiB", KIB}, {"B", 1}};
    char *end;
    double value = strtod(*text, &end);
    for (size_t i = 0; end != *text && i < sizeof units / sizeof *units; i++) {
        size_t length = strlen(units[i].name);
        if (!strncmp(end, units[i].name, length)) {
            *text = end + length;
            return (size_t)(value * (double)units[i].size);
        }
    }
    return 0;
}

static size_t
setting_bytes(const char *name, const char *otherwise)
{
    const char *text = setting(name, otherwise), *at = text;
    size_t size = read_bytes(&at);
    if (at == text || *at)
        refuse(name, "a size, as in 400MiB");
    return size;
}

/* The part of a list that belongs to a GPU; the last part serves those after it. */
static void
part(const char *list, char separator, int index, char *out, size_t room)
{
    for (const char *next; index-- && (next = strchr(list, separator));)
        list = next + 1;
    size_t length = strcspn(list, (char[]){separator, 0});
    if (length >= room)
        length = room - 1;
    memcpy(out, list, length);
    out[length] = 0;
}

/* 24GiB,12GiB or 8x4GiB: how many GPUs there are, and their memory. */
static void
read_gpus(void)
{
    static const char expected[] = "up to 16 sizes, as in 24GiB,12GiB or 8x4GiB";
    const char *at = setting("RIG_GPUS", "24GiB");
    for (;;) {
        char *behind;
        long times = strtol(at, &behind, 10);
        if (*behind == 'x')
            at = behind + 1;
        else
            times = 1;
        const char *before = at;
        size_t capacity = read_bytes(&at);
        if (at == before || times < 1 || rig_num_gpus + times > MAX_GPUS)
            refuse("RIG_GPUS", expected);
        while (times--)
            rig_gpus[rig_num_gpus++].capacity = capacity;
        if (!*at)
            return;
        if (*at++ != ',')
            refuse("RIG_GPUS", expected);
    }
}

static void
describe(Gpu *gpu, int index)
{
    char text[64];
    part(setting("RIG_NAMES", "NVIDIA GeForce RTX 3090"), '|', index, gpu->name, sizeof gpu->name);
    part(setting("RIG_CAPABILITY", "8.6"), ',', index, text, sizeof text);
    if (sscanf(text, "%d.%d", &gpu->major, &gpu->minor) != 2)
        refuse("RIG_CAPABILITY", "compute capabilities, as in 8.6,7.5");
    part(setting("RIG_PROCESSORS", "82"), ',', index, text, sizeof text);
    gpu->num_processors = atoi(text);
    if (gpu->num_processors < 1)
        refuse("RIG_PROCESSORS", "numbers of multiprocessors, as in 82,40");
    gpu->context_bytes = setting_bytes("RIG_CONTEXT", "0B");
    if (gpu->context_bytes > gpu->capacity)
        refuse("RIG_CONTEXT", "less than the smallest GPU of RIG_GPUS");
    memset(gpu->uuid, 0xa0 + index, sizeof gpu->uuid);
}

static int
by_uuid(const char *prefix)
{
    char uuid[40];
    for (int i = 0; i < rig_num_gpus; i++) {
        rig_write_uuid(&rig_gpus[i], uuid);
        if (!strncmp(prefix, uuid, strlen(prefix)))
            return i;
    }
    return -1;
}

/* As CUDA reads it: numbers or UUIDs; what follows one that isn't there doesn't count. */
static void
read_visible(void)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
        for (int i = 0; i < rig_num_gpus; i++)
            visible[rig_num_visible++] = i;
        return;
    }
    while (*text && rig_num_visible < MAX_GPUS) {
        char item[64];
        part(text, ',', 0, item, sizeof item);
        text += strcspn(text, ",");
        text += *text == ',';
        int index = -1;
        if (!strncmp(item, "GPU-", 4))
            index = by_uuid(item + 4);
        else if (*item >= '0' && *item <= '9')
            index = atoi(item);
        if (index < 0 || index >= rig_num_gpus)
            return;
        visible[rig_num_visible++] = index;
    }
}

static void
start(void)
{
    read_gpus();
    for (int i = 0; i < rig_num_gpus; i++)
        describe(&rig_gpus[i], i);
    rig_settings = (Settings){
        .copy_limit = setting_bytes("RIG_COPY_LIMIT", "1MiB"),
        .has_peers = atoi(setting("RIG_PEERS", "0")),
        .lag = strtoull(setting("RIG_LAG", "0"), NULL, 10),
        .node_bytes = setting_bytes("RIG_GRAPH_NODE", "0B"),
    };
    const char *path = setting("RIG_LOG", "");
    log_file = *path ? fopen(path, "a") : NULL;
    if (*path && !log_file)
        refuse("RIG_LOG", "a file that can be written");
    read_visible();
    rig_read_defects();
}

static void
lock_for_fork(void)
{
    pthread_mutex_lock(&rig_lock);
}

static void
unlock_after_fork(void)
{
    pthread_mutex_unlock(&rig_lock);
}

static void
start_once(void)
{
    /* A thread that isn't in the fork must not leave the lock taken there. */
    pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork);
    start();
}

void
rig_begin(void)
{
    pthread_once(&once, start_once);
}

/* Read the settings anew: for a forked child, as long as nobody has used CUDA. */
EXPORT int
rig_restart(void)
{
    rig_begin();
    if (rig_has_started)
        return -1;
    memset(rig_gpus, 0, sizeof rig_gpus);
    rig_num_gpus = rig_num_visible = 0;
    start();
    return 0;
}

int
rig_is_logging(void)
{
    return log_file != NULL;
}

void
rig_log(const char *format, ...)
{
    if (!log_file)
        return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(log_file, format, arguments);
    va_end(arguments);
    fputc('\n', log_file);
    fflush(log_file);
}

int
rig_physical(int ordinal)
{
    return visible[ordinal];
}

Gpu *
rig_visible(int ordinal)
{
    return &rig_gpus[visible[ordinal]];
}

void
rig_write_uuid(const Gpu *gpu, char *text)
{
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *text++ = '-';
        text += sprintf(text, "%02x", gpu->uuid[i]);
    }
}
