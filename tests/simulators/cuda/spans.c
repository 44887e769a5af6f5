/* Address ranges in order, and objects by number. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *need(void *memory)
{
    if (!memory) {
        fputs("simulated CUDA driver: out of host memory\n", stderr);
        abort();
    }
    return memory;
}

/* Index of the first span that ends beyond the address. */
size_t spans_after(const struct spans *spans, CUdeviceptr address)
{
    size_t low = 0, high = spans->count;

    while (low < high) {
        size_t middle = (low + high) / 2;
        if (spans->items[middle]->at + spans->items[middle]->size > address)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

struct span *spans_at(const struct spans *spans, CUdeviceptr address)
{
    size_t index = spans_after(spans, address);

    if (index == spans->count || spans->items[index]->at > address)
        return NULL;
    return spans->items[index];
}

bool spans_overlap(const struct spans *spans, CUdeviceptr at, size_t size)
{
    size_t index = spans_after(spans, at);

    if (index == spans->count)
        return false;
    return ranges_overlap(spans->items[index]->at, spans->items[index]->size, at, size);
}

/* Written so that no sum can wrap around. */
bool span_holds(const struct span *span, CUdeviceptr at, size_t size)
{
    return at >= span->at && size <= span->size && at - span->at <= span->size - size;
}

bool ranges_overlap(CUdeviceptr a, size_t a_size, CUdeviceptr b, size_t b_size)
{
    return a <= b ? b - a < a_size && b_size : a - b < b_size && a_size;
}

void spans_insert(struct spans *spans, struct span *span)
{
    size_t index = spans_after(spans, span->at);

    if (spans->count == spans->room) {
        spans->room = spans->room ? spans->room * 2 : 64;
        spans->items = need(realloc(spans->items, spans->room * sizeof *spans->items));
    }
    memmove(spans->items + index + 1, spans->items + index,
            (spans->count - index) * sizeof *spans->items);
    spans->items[index] = span;
    spans->count++;
}

void spans_remove(struct spans *spans, const struct span *span)
{
    size_t index = spans_after(spans, span->at);

    spans->count--;
    memmove(spans->items + index, spans->items + index + 1,
            (spans->count - index) * sizeof *spans->items);
}

void spans_clear(struct spans *spans)
{
    for (size_t i = 0; i < spans->count; i++)
        free(spans->items[i]);
    free(spans->items);
    *spans = (struct spans){0};
}

uint64_t table_add(struct table *table, void *item)
{
    if (table->count == table->room) {
        table->room = table->room ? table->room * 2 : 64;
        table->items = need(realloc(table->items, table->room * sizeof *table->items));
    }
    table->items[table->count] = item;
    return table->first + table->count++;
}

void *table_get(const struct table *table, uint64_t number)
{
    if (number < table->first || number - table->first >= table->count)
        return NULL;
    return table->items[number - table->first];
}

void table_clear(struct table *table)
{
    for (size_t i = 0; i < table->count; i++)
        free(table->items[i]);
    free(table->items);
    *table = (struct table){.first = table->first + table->count};
}
