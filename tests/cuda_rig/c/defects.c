/* Defects of a machine that are planted by the environment: README.md lists the variables. */

#include "rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SOUND, ZEROS, GARBAGE };

static int peers[MAX_GPUS][MAX_GPUS]; /* what becomes of a copy, by source and target */
static int lost, neighbour; /* the GPU it happens to; -1 where it doesn't */
static unsigned long long lost_at, neighbour_at;
static double neighbour_gib;

static void
refuse(const char *name, const char *expected)
{
    fprintf(stderr, "cuda_rig: %s=%s can't be read; it takes %s\n", name, getenv(name), expected);
    exit(2);
}

static int
is_gpu(int index)
{
    return index >= 0 && index < rig_num_gpus;
}

static void
read_peers(const char *text)
{
    for (; text && *text; text += *text == ',') {
        char how[16] = "";
        int source = -1, target = -1, length = 0;
        sscanf(text, "%d>%d=%15[a-z]%n", &source, &target, how, &length);
        if (!length || !is_gpu(source) || !is_gpu(target) || (text[length] && text[length] != ','))
            refuse("RIG_BAD_PEERS", "pairs, as in 0>1=zeros,1>0=garbage");
        peers[source][target] = strcmp(how, "zeros") ? GARBAGE : ZEROS;
        text += length;
    }
}

void
rig_read_defects(void)
{
    memset(peers, 0, sizeof peers);
    lost = neighbour = -1;
    lost_at = neighbour_at = 0;
    read_peers(getenv("RIG_BAD_PEERS"));
    const char *text = getenv("RIG_LOST");
    if (text && (sscanf(text, "%d@%llu", &lost, &lost_at) < 1 || !is_gpu(lost)))
        refuse("RIG_LOST", "a GPU and a number of launches, as in 1@50");
    text = getenv("RIG_NEIGHBOUR");
    if (text && (sscanf(text, "%d:%lfGiB@%llu", &neighbour, &neighbour_gib, &neighbour_at) < 2 ||
                 !is_gpu(neighbour)))
        refuse("RIG_NEIGHBOUR", "a GPU, a size and a number of launches, as in 1:6GiB@50");
    rig_befall(rig_now());
}

/* What the clock brings about. */
void
rig_befall(uint64_t now)
{
    if (neighbour >= 0 && now >= neighbour_at) {
        Gpu *gpu = &rig_gpus[neighbour];
        size_t size = (size_t)(neighbour_gib * (double)GIB), room = gpu->capacity - gpu->used;
        gpu->neighbour = size < room ? size : room;
        gpu->used += gpu->neighbour;
        neighbour = -1;
    }
}

int
rig_is_lost(const Gpu *gpu)
{
    return lost >= 0 && gpu == &rig_gpus[lost] && rig_now() >= lost_at;
}

/* Spoil a copy from GPU to GPU, if it is one that doesn't arrive; whether it was. */
int
rig_spoil(int source, int target, void *to, size_t size)
{
    if (source < 0 || target < 0 || source == target)
        return 0;
    int how = peers[rig_physical(source)][rig_physical(target)];
    uint32_t reach = rig_visible(source)->peers >> target | rig_visible(target)->peers >> source;
    if (!how || !(reach & 1))
        return 0;
    if (how == ZEROS) {
        rig_clear(rig_visible(target), (uintptr_t)to, size);
    } else if (size <= rig_settings.copy_limit) {
        memset(to, 0x5a, size);
        rig_mark(to, size);
    }
    return 1;
}
