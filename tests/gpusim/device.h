/* Handles, and what every entry point does first. */
#ifndef GPUSIM_DEVICE_H
#define GPUSIM_DEVICE_H

#include "nvml.h"

#include <stdbool.h>

enum { MAX_GPUS = 16, MAX_MIG = 7, WHOLE = -1 };

/* What a handle points to: a GPU by its place in gpusim.json, and which of its MIG instances or WHOLE. */
struct device {
    int gpu, mig;
};

/* The handle of a GPU or of one of its MIG instances. */
nvmlDevice_t device_handle(int gpu, int mig);

/* The object of the GPU that a handle belongs to; of the MIG instance (NULL for a whole GPU); of what it points to. */
const char *device_gpu(const char *state, nvmlDevice_t device);
const char *device_mig(const char *state, nvmlDevice_t device);
const char *device_object(const char *state, nvmlDevice_t device);

/* The newest state, the injected faults of `function`, then the checks of the real library. */
nvmlReturn_t enter(const char *function, const char **state);
nvmlReturn_t enter_device(const char *function, nvmlDevice_t device, const char **state);

/* Declare `state` and leave the entry point where it must not go on. */
#define ENTER(state)                                                                                                   \
    const char *state;                                                                                                 \
    nvmlReturn_t entered = enter(__func__, &state);                                                                    \
    if (entered)                                                                                                       \
    return entered

#define ENTER_DEVICE(state, device)                                                                                    \
    const char *state;                                                                                                 \
    nvmlReturn_t entered = enter_device(__func__, device, &state);                                                     \
    if (entered)                                                                                                       \
    return entered

/* Copies a text member into a caller's buffer as NVML does: whole or not at all. */
nvmlReturn_t copy_text(const char *value, char *to, unsigned int size);

#endif
