/* Moving bytes: through the files behind device memory, never through its addresses, so that a
 * range which is not there is an error of the copy and not a crash of the process. */
#include "sim.h"

#include <errno.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* One end of a chunk: a place in a device's file, or a host address. */
struct place {
    struct handle *handle; /* NULL on the host; held by a mover count while the lock is dropped */
    int file;
    off_t offset;
    char *address;
};

/* Where an address is now; shortens `size` to what lies there in one piece. */
static bool locate(CUdeviceptr at, bool on_device, int access, int device, size_t *size,
                   struct place *place)
{
    if (!on_device) {
        *place = (struct place){.file = -1, .address = (char *)(uintptr_t)at};
        return true;
    }
    struct mapping *mapping = (struct mapping *)spans_at(&sim.mappings, at);
    if (!mapping || !accessible(at, 1, device, access))
        return false;
    size_t inside = at - mapping->span.at, left = mapping->span.size - inside;
    if (*size > left)
        *size = left;
    *place = (struct place){.handle = mapping->handle, .file = sim.files[mapping->handle->device],
                            .offset = mapping->handle->offset + (off_t)inside};
    return true;
}

static void hold(const struct place *place)
{
    if (place->handle)
        place->handle->movers++;
}

static void let_go(const struct place *place)
{
    if (!place->handle)
        return;
    place->handle->movers--;
    release_if_unused(place->handle);
}

static bool read_all(const struct place *place, char *out, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t got = pread(place->file, out + done, size - done, place->offset + (off_t)done);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        done += (size_t)got;
    }
    return true;
}

static bool write_all(const struct place *place, const char *in, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t put = pwrite(place->file, in + done, size - done, place->offset + (off_t)done);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return false;
        done += (size_t)put;
    }
    return true;
}

/* False when the kernel finds no host memory at the address. */
static bool move(const struct place *to, const struct place *from, size_t size)
{
    char between[CHUNK_BYTES];

    if (to->handle && from->handle)
        return read_all(from, between, size) && write_all(to, between, size);
    if (to->handle)
        return write_all(to, from->address, size);
    if (from->handle)
        return read_all(from, to->address, size);
    memmove(to->address, from->address, size);
    return true;
}

static void pace(size_t size, uint64_t bytes_per_s)
{
    if (!bytes_per_s)
        return;
    uint64_t ns = (uint64_t)((double)size * 1e9 / (double)bytes_per_s);
    struct timespec left = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    while (nanosleep(&left, &left) && errno == EINTR)
        continue;
}

/* A copy finds its memory chunk by chunk: what is unmapped while it runs is missed as well. */
static CUresult run_paced(const struct stream *stream, const struct transfer *copy,
                          const uint64_t *rate)
{
    int device = stream->context->device;

    for (size_t done = 0; done < copy->size;) {
        size_t size = copy->size - done < CHUNK_BYTES ? copy->size - done : CHUNK_BYTES;
        struct place to, from;
        CUdeviceptr source = copy->staged ? (uintptr_t)copy->staged : copy->from;

        if (!locate(copy->to + done, copy->to_device, ACCESS_READ_WRITE, device, &size, &to) ||
            !locate(source + done, copy->from_device, ACCESS_READ, device, &size, &from)) {
            violated(QUEUED_COPY_FAULTED);
            return ILLEGAL_ADDRESS;
        }
        uint64_t bytes_per_s = rate ? *rate : 0;
        hold(&to);
        hold(&from);
        pthread_mutex_unlock(&sim.lock);
        bool moved = move(&to, &from, size);
        pace(size, bytes_per_s);
        pthread_mutex_lock(&sim.lock);
        let_go(&to);
        let_go(&from);
        if (!moved) {
            violated(HOST_BYTES_GONE);
            return ILLEGAL_ADDRESS;
        }
        done += size;
    }
    return SUCCESS;
}

CUresult run_copy(const struct stream *stream, const struct transfer *copy)
{
    return run_paced(stream, copy, &sim.copy_bytes_per_s);
}

/* What a kernel does: at once, between device memory and memory of the simulator's own. */
CUresult read_memory(const struct stream *stream, CUdeviceptr from, void *out, size_t size)
{
    return run_paced(stream, &(struct transfer){.to = (uintptr_t)out, .from = from, .size = size,
                                                .from_device = true}, NULL);
}

CUresult write_memory(const struct stream *stream, CUdeviceptr to, void *in, size_t size)
{
    return run_paced(stream, &(struct transfer){.to = to, .from = (uintptr_t)in, .size = size,
                                                .to_device = true}, NULL);
}

/* The value's bytes start over at every chunk, so chunks are multiples of its width. */
CUresult run_fill(const struct stream *stream, const struct fill *fill)
{
    uint32_t pattern[CHUNK_BYTES / sizeof(uint32_t)];
    int device = stream->context->device;

    for (size_t i = 0; i < sizeof pattern / sizeof *pattern; i++)
        pattern[i] = fill->value;
    for (size_t done = 0; done < fill->size;) {
        size_t size = fill->size - done < CHUNK_BYTES ? fill->size - done : CHUNK_BYTES;
        struct place to;

        if (!locate(fill->to + done, true, ACCESS_READ_WRITE, device, &size, &to)) {
            violated(QUEUED_COPY_FAULTED);
            return ILLEGAL_ADDRESS;
        }
        hold(&to);
        pthread_mutex_unlock(&sim.lock);
        bool moved = write_all(&to, (const char *)pattern, size);
        pthread_mutex_lock(&sim.lock);
        let_go(&to);
        if (!moved)
            return OPERATING_SYSTEM;
        done += size;
    }
    return SUCCESS;
}
