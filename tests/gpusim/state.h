/* What the simulated driver knows: the machine in gpusim.json, and the memory of live processes in memory/. */
#ifndef GPUSIM_STATE_H
#define GPUSIM_STATE_H

#include <stdbool.h>

enum { MAX_RECORDS = 512, UUID_SIZE = 96 };

/* GPU memory that a live process holds. `unknown`: the process is listed, its memory is not, as under MPS. */
struct record {
    char uuid[UUID_SIZE];
    unsigned long long bytes;
    char type; /* C compute, G graphics, M MPS client */
    bool unknown;
    unsigned int pid; /* in the reader's PID namespace; 0: not visible from it */
};

/* The newest gpusim.json, valid until this thread's next call; NULL where there is none (no driver loaded). */
const char *state_load(void);

/* The error to answer for `function` in this scope (the whole driver, a GPU or a MIG instance), 0 for none.
 * Takes its time where the scope says that the function is slow, and does not return where it hangs. */
unsigned int state_fault(const char *state, const char *scope, const char *function);

/* Records whose process lives. Returns their number, at most MAX_RECORDS. */
int state_records(struct record *records);

/* The next of a GPU's flickering figures; the last one stays. */
unsigned long long state_flicker(const char *uuid, const char *values);

#endif
