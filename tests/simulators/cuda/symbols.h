#ifndef SIM_SYMBOLS_H
#define SIM_SYMBOLS_H

typedef void (*entry_point)(void);

/* The newest form of a call that a caller of that CUDA version knows, or NULL; too_old says that
 * only newer forms exist. */
entry_point find_symbol(const char *name, int version, int *too_old);

#endif
