/* Names to symbols: what cuGetProcAddress looks up.
 *
 * Apart from the other files, because here every entry point is only an address.
 */
#include "symbols.h"

#include <stddef.h>
#include <string.h>

#include "calls.h"

#define DECLARE(name, since, symbol) void symbol(void);
CALLS(DECLARE)
LATER_FORMS(DECLARE)

#define ROW(name, since, symbol) {#name, #symbol, since, symbol},
static const struct {
    const char *name, *symbol;
    int since;
    entry_point address;
} rows[] = {CALLS(ROW) LATER_FORMS(ROW)};

entry_point find_symbol(const char *name, int version, int *too_old)
{
    entry_point found = NULL;
    int newest = -1;

    *too_old = 0;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].name, name) && strcmp(rows[i].symbol, name))
            continue;
        if (rows[i].since > version) {
            *too_old = 1;
        } else if (rows[i].since > newest) {
            newest = rows[i].since;
            found = rows[i].address;
        }
    }
    return found;
}
