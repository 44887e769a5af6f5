/* What tests set and read, beside the driver's own interface: the functions named sim_*.
 *
 * Setters answer 0, or -1 for a device, a number or a moment that does not fit.
 */
#include "sim.h"

#include <string.h>

/* --------------------------------------------------------------------------------- settings */

void set_defaults(void)
{
    sim.device_count = -1; /* as the environment says */
    sim.stale_byte = DEFAULT_STALE_BYTE;
    sim.on_demand = false;
    sim.capturing = false;
    sim.copy_bytes_per_s = 0;
    sim.pinned_limit_bytes = UINT64_MAX;
    for (int device = 0; device < MAX_DEVICES; device++)
        sim.granularity[device] = DEFAULT_GRANULARITY_BYTES;
    memset(sim.total, 0, sizeof sim.total);
    memset(sim.attribute_set, 0, sizeof sim.attribute_set);
}

/* Back to the state before cuInit, with every setting as it was when the library was loaded.
 * Queued work is dropped. No other thread may be in the driver. */
API void sim_reset(void)
{
    pthread_mutex_lock(&sim.lock);
    stop_workers();
    unmap_everything();
    release_host_ranges();
    table_clear(&sim.handles);
    clear_modules();
    release_device_files();
    pool_close();
    memset(sim.contexts, 0, sizeof sim.contexts);
    memset(sim.violations, 0, sizeof sim.violations);
    sim.pageable_copy_bytes = 0;
    sim.initialised = false;
    sim.epoch++;
    reset_calls();
    set_defaults();
    pthread_mutex_unlock(&sim.lock);
}

static int setter(bool fits)
{
    pthread_mutex_unlock(&sim.lock);
    return fits ? 0 : -1;
}

static bool device_number(int device)
{
    pthread_mutex_lock(&sim.lock);
    return device >= 0 && device < MAX_DEVICES;
}

/* Only before cuInit. */
API int sim_set_devices(int count)
{
    pthread_mutex_lock(&sim.lock);
    bool fits = count >= 0 && count <= MAX_DEVICES && !sim.initialised;
    if (fits)
        sim.device_count = count;
    return setter(fits);
}

API int sim_set_total(int device, uint64_t bytes)
{
    bool fits = device_number(device) && bytes;
    if (fits)
        sim.total[device] = bytes;
    return setter(fits);
}

/* What may be in use of a device, by all processes that share it. UINT64_MAX: all of it. */
API int sim_set_budget(int device, uint64_t bytes)
{
    bool fits = device_number(device);
    if (fits)
        pool_set_budget(device, bytes);
    return setter(fits);
}

API int sim_set_granularity(int device, uint64_t bytes)
{
    bool fits = device_number(device) && bytes >= MIN_GRANULARITY_BYTES && !(bytes & (bytes - 1));
    if (fits)
        sim.granularity[device] = bytes;
    return setter(fits);
}

API int sim_set_attribute(int device, int attribute, int value)
{
    bool fits = device_number(device) && attribute > 0 && attribute < ATTRIBUTE_COUNT;
    if (fits) {
        sim.attributes[device][attribute] = value;
        sim.attribute_set[device][attribute] = true;
    }
    return setter(fits);
}

/* What new memory is full of. -1: zeros that take no host memory until they are written. */
API int sim_set_stale_byte(int byte)
{
    pthread_mutex_lock(&sim.lock);
    bool fits = byte >= -1 && byte <= 255;
    if (fits)
        sim.stale_byte = byte;
    return setter(fits);
}

/* How fast each stream copies. 0: as fast as the host does. */
API int sim_set_copy_rate(uint64_t bytes_per_s)
{
    pthread_mutex_lock(&sim.lock);
    sim.copy_bytes_per_s = bytes_per_s;
    return setter(true);
}

/* Whether streams run only as far as somebody waits for or asks about them. */
API int sim_set_on_demand(int on)
{
    pthread_mutex_lock(&sim.lock);
    sim.on_demand = on != 0;
    for (size_t i = 0; i < sim.streams.count; i++)
        pthread_cond_broadcast(&((struct stream *)sim.streams.items[i])->wake);
    return setter(true);
}

API int sim_set_pinned_limit(uint64_t bytes)
{
    pthread_mutex_lock(&sim.lock);
    sim.pinned_limit_bytes = bytes;
    return setter(true);
}

/* ------------------------------------------------------------------------------- violations */

static const char *const violation_names[VIOLATION_COUNT] = {
    [DOUBLE_RELEASE] = "double_release",
    [UNKNOWN_HANDLE] = "unknown_handle",
    [UNMAP_IN_USE] = "unmap_in_use",
    [UNMAP_NOTHING] = "unmap_nothing",
    [QUEUED_COPY_FAULTED] = "queued_copy_faulted",
    [HOST_RELEASED_IN_USE] = "host_released_in_use",
    [HOST_BYTES_GONE] = "host_bytes_gone",
    [CALL_IN_CALLBACK] = "call_in_callback",
    [UNLOAD_IN_USE] = "unload_in_use",
    [CAPTURE_LOST] = "capture_lost",
};

/* NULL after the last one. */
API const char *sim_violation_name(int kind)
{
    return kind >= 0 && kind < VIOLATION_COUNT ? violation_names[kind] : NULL;
}

API uint64_t sim_violations(int kind)
{
    pthread_mutex_lock(&sim.lock);
    uint64_t count = kind >= 0 && kind < VIOLATION_COUNT ? sim.violations[kind] : 0;
    pthread_mutex_unlock(&sim.lock);
    return count;
}

/* ------------------------------------------------------------------------------------ usage */

struct device_usage {
    uint64_t total_bytes, budget_bytes, free_bytes, used_bytes, live_handles, live_mappings,
        context_references;
};

struct process_usage {
    uint64_t reserved_bytes, reservations, pinned_bytes, pinned_ranges, pageable_copy_bytes,
        live_streams, live_events, queued_operations, live_modules;
};

/* used_bytes are this process's, free_bytes what all that share the device leave. */
API int sim_device_usage(int device, struct device_usage *out)
{
    bool fits = device_number(device);

    if (!fits)
        return setter(false);
    *out = (struct device_usage){.total_bytes = total_bytes(device),
                                 .budget_bytes = pool_budget(device),
                                 .context_references = (uint64_t)sim.contexts[device].references};
    pool_usage(device, &out->free_bytes, &out->used_bytes);
    for (size_t i = 0; i < sim.handles.count; i++) {
        const struct handle *handle = sim.handles.items[i];
        out->live_handles += handle->backed && handle->device == device;
    }
    for (size_t i = 0; i < sim.mappings.count; i++) {
        const struct mapping *mapping = (const struct mapping *)sim.mappings.items[i];
        out->live_mappings += mapping->handle->device == device;
    }
    return setter(true);
}

API void sim_process_usage(struct process_usage *out)
{
    pthread_mutex_lock(&sim.lock);
    *out = (struct process_usage){.reservations = sim.reservations.count,
                                  .pinned_bytes = sim.pinned_bytes,
                                  .pinned_ranges = sim.host_ranges.count,
                                  .pageable_copy_bytes = sim.pageable_copy_bytes,
                                  .queued_operations = queued_operations(),
                                  .live_modules = live_modules()};
    for (size_t i = 0; i < sim.reservations.count; i++)
        out->reserved_bytes += sim.reservations.items[i]->size;
    for (size_t i = 0; i < sim.streams.count; i++) {
        const struct stream *stream = sim.streams.items[i];
        out->live_streams += !stream->retired && stream != stream->context->legacy;
    }
    for (size_t i = 0; i < sim.events.count; i++)
        out->live_events += !((const struct event *)sim.events.items[i])->retired;
    pthread_mutex_unlock(&sim.lock);
}

/* ------------------------------------------------------------------------------------- lists
 *
 * Each writes at most `room` rows and answers how many there are.
 */

struct handle_row {
    uint64_t number, size_bytes;
    int64_t device;
    uint64_t references, mappings, takes, releases, live;
};

struct mapping_row {
    uint64_t address, size_bytes, handle;
    int64_t device;
    uint64_t access[MAX_DEVICES];
};

struct range_row {
    uint64_t address, size_bytes;
};

/* Dead handles too, so that their counters can be read. */
API size_t sim_handles(struct handle_row *rows, size_t room)
{
    pthread_mutex_lock(&sim.lock);
    size_t count = sim.handles.count;
    for (size_t i = 0; i < count && i < room; i++) {
        const struct handle *handle = sim.handles.items[i];
        rows[i] = (struct handle_row){handle->number, handle->size, handle->device,
                                      (uint64_t)handle->references, (uint64_t)handle->mappings,
                                      handle->takes, handle->releases, handle->backed};
    }
    pthread_mutex_unlock(&sim.lock);
    return count;
}

API size_t sim_mappings(struct mapping_row *rows, size_t room)
{
    pthread_mutex_lock(&sim.lock);
    size_t count = sim.mappings.count;
    for (size_t i = 0; i < count && i < room; i++) {
        const struct mapping *mapping = (const struct mapping *)sim.mappings.items[i];
        rows[i] = (struct mapping_row){mapping->span.at, mapping->span.size,
                                       mapping->handle->number, mapping->handle->device, {0}};
        for (int device = 0; device < MAX_DEVICES; device++)
            rows[i].access[device] = mapping->access[device];
    }
    pthread_mutex_unlock(&sim.lock);
    return count;
}

static size_t list_ranges(const struct spans *spans, struct range_row *rows, size_t room)
{
    pthread_mutex_lock(&sim.lock);
    size_t count = spans->count;
    for (size_t i = 0; i < count && i < room; i++)
        rows[i] = (struct range_row){spans->items[i]->at, spans->items[i]->size};
    pthread_mutex_unlock(&sim.lock);
    return count;
}

API size_t sim_reservations(struct range_row *rows, size_t room)
{
    return list_ranges(&sim.reservations, rows, room);
}

API size_t sim_pinned(struct range_row *rows, size_t room)
{
    return list_ranges(&sim.host_ranges, rows, room);
}
