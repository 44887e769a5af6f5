/* The kernels of packing, made of the library that packs host memory.
 *
 * Memory of the device is copied out and back, so that what is not mapped is an error. Like the real
 * kernels, each does its part, and with what those before it have left.
 */
#include "sim.h"

#include <stdlib.h>

#define EXPORT static
#include "packing.c"

enum { TABLE_AT = sizeof(PackingHeader), ENTRY_BYTES = sizeof(PackingWord) };

/* How many blocks there have to be; 0 for a launch that the real kernels are not made for. */
uint64_t packing_blocks(const struct launch *launch)
{
    const PackingSize unpacked_bytes = launch->kernel == UNPACK ? launch->to_size : launch->from_size;
    const PackingSize tiles = (unpacked_bytes + 16 * PACKING_OCTETS - 1) / (16 * PACKING_OCTETS);
    PackingPlan plan = {0};

    if (launch->kernel == UNPACK)
        return launch->from_size < TABLE_AT || unpacked_bytes > PACKING_MOST_BYTES ? 0 : tiles + !tiles;
    if (!packing_plan(launch->layout, unpacked_bytes, &plan))
        return 0;
    if (launch->kernel != TALLY && launch->to_size < plan.escapes_at)
        return 0;
    return launch->kernel == PREFIX ? 1 : plan.tiles;
}

/* A copy of device memory; to be freed, also if it could not be made. */
static unsigned char *copy_out(const struct stream *stream, CUdeviceptr at, size_t size, CUresult *result)
{
    unsigned char *copy = need(malloc(size + 1));

    if (!*result)
        *result = read_memory(stream, at, copy, size);
    return copy;
}

/* -------------------------------------------------------------------------------- of rows */

typedef void (*each_span)(const void *data, PackingSize size, PackingWord layout, uint64_t found[2]);

static void survey_span(const void *data, PackingSize size, PackingWord layout, uint64_t found[2])
{
    (void)layout;
    found[1] = 0;
    found[0] = sb_pack_survey(data, size, &found[1]);
}

/* Adds to what is there, as the real one does. */
static void count_span(const void *data, PackingSize size, PackingWord layout, uint64_t found[2])
{
    found[0] += sb_pack_count(data, size, layout);
}

static CUresult run_rows(const struct stream *stream, const struct launch *launch, each_span each)
{
    const PackingSize mask = (1ull << 40) - 1;
    CUresult result = SUCCESS;

    for (unsigned i = 0; !result && i < launch->count; i++) {
        CUdeviceptr at = launch->to + i * 16;
        uint64_t span[2] = {0, 0}, found[2];

        if ((result = read_memory(stream, launch->from + i * sizeof span, span, sizeof span)) ||
            (result = read_memory(stream, at, found, sizeof found)))
            break;
        unsigned char *data = copy_out(stream, span[0], span[1] & mask, &result);
        if (!result) {
            each(data, span[1] & mask, PACKING_VERSION | (PackingWord)(span[1] >> 40) << 8, found);
            result = write_memory(stream, at, found, sizeof found);
        }
        free(data);
    }
    return result;
}

CUresult run_survey(const struct stream *stream, const struct launch *launch)
{
    return run_rows(stream, launch, survey_span);
}

CUresult run_count(const struct stream *stream, const struct launch *launch)
{
    return run_rows(stream, launch, count_span);
}

/* --------------------------------------------------------------------------------- packing */

CUresult run_tally(const struct stream *stream, const struct launch *launch)
{
    PackingPlan plan = {0};
    CUresult result = SUCCESS;

    packing_plan(launch->layout, launch->from_size, &plan);
    const PackingSize tile_bytes = 8ull * PACKING_OCTETS * plan.element_bytes;
    unsigned char *data = copy_out(stream, launch->from, launch->from_size, &result);
    for (PackingSize tile = 0; !result && tile < plan.tiles; tile++) {
        const PackingSize at = tile * tile_bytes, left = launch->from_size - at;
        PackingWord escapes = (PackingWord)sb_pack_count(
            data + at, left < tile_bytes ? left : tile_bytes, launch->layout);
        result = write_memory(stream, launch->to + TABLE_AT + tile * ENTRY_BYTES, &escapes, ENTRY_BYTES);
    }
    free(data);
    return result;
}

CUresult run_prefix(const struct stream *stream, const struct launch *launch)
{
    PackingHeader header = {.layout = launch->layout, .size_bytes = launch->from_size};
    PackingPlan plan = {0};
    CUresult result = SUCCESS;
    unsigned char zeros[16] = {0};

    packing_plan(launch->layout, launch->from_size, &plan);
    const PackingSize whole = plan.elements * plan.element_bytes;
    PackingWord *table = need(malloc(plan.entries * ENTRY_BYTES));
    result = read_memory(stream, launch->to + TABLE_AT, table, plan.tiles * ENTRY_BYTES);
    for (PackingSize entry = 0; entry < plan.entries; entry++) {
        const PackingWord escapes = entry < plan.tiles ? table[entry] : 0;
        table[entry] = header.escapes;
        header.escapes += escapes;
    }
    const PackingSize at = plan.escapes_at + header.escapes, end = packing_bytes(&plan, header.escapes);
    header.magic = end <= launch->to_size ? PACKING_MAGIC : PACKING_OVERFLOWED;
    if (!result)
        result = read_memory(stream, launch->from + whole, &header.tail, launch->from_size - whole);
    if (!result)
        result = write_memory(stream, launch->to + TABLE_AT, table, plan.entries * ENTRY_BYTES);
    if (!result && at < launch->to_size)
        result = write_memory(stream, launch->to + at, zeros,
                              (end < launch->to_size ? end : launch->to_size) - at);
    if (!result)
        result = write_memory(stream, launch->to, &header, sizeof header);
    free(table);
    return result;
}

/* Of memory that changed since its escapes were counted it writes no more of them than were counted. */
CUresult run_pack(const struct stream *stream, const struct launch *launch)
{
    PackingHeader header;
    PackingPlan plan = {0};
    CUresult result = SUCCESS;

    packing_plan(launch->layout, launch->from_size, &plan);
    const PackingSize room = launch->to_size - plan.escapes_at;
    PackingWord counted = 0;
    unsigned char *packed = need(malloc(launch->to_size));
    unsigned char *data = copy_out(stream, launch->from, launch->from_size, &result);
    sb_pack(data, launch->from_size, launch->layout, packed, launch->to_size);
    memcpy(&header, packed, sizeof header);
    if (!result)
        result = read_memory(stream, launch->to + TABLE_AT + plan.tiles * ENTRY_BYTES, &counted, ENTRY_BYTES);
    PackingSize escapes = header.escapes < counted ? header.escapes : counted;
    escapes = escapes < room ? escapes : room;
    if (!result)
        result = write_memory(stream, launch->to + plan.planes_at, packed + plan.planes_at,
                              plan.escapes_at - plan.planes_at + escapes);
    free(data);
    free(packed);
    return result;
}

CUresult run_unpack(const struct stream *stream, const struct launch *launch)
{
    PackingHeader header;
    CUresult result = SUCCESS;
    unsigned char *data = need(malloc(launch->to_size + 1));
    unsigned char *packed = copy_out(stream, launch->from, launch->from_size, &result);

    memcpy(&header, packed, sizeof header);
    if (!result && header.size_bytes == launch->to_size &&
        sb_unpack(packed, launch->from_size, 0, data, launch->to_size))
        result = write_memory(stream, launch->to, data, launch->to_size);
    free(packed);
    free(data);
    return result;
}
