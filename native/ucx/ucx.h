/* libucp: the loader, and a UCP worker behind the rings of rings.h. */
#ifndef SLUICE_UCX_H
#define SLUICE_UCX_H

#include "rings/rings.h"

/* Sets, in the C environment, the variables that UCX reads when it is first loaded
 * (over any value but that of UCX_LOG_FILE): no debugger signal, no fault handlers,
 * no patches in libc's memory calls. Idempotent. Both loaders call it. */
void sluice_ucx_environment(void);

/* The version of the libucp that is loaded from path. Returns 0 if it is not loaded. */
int sluice_ucx_version(const char *path, unsigned *major, unsigned *minor, unsigned *patch);

/* Loads libucp, as sluice_nixl_load does NIXL. If a libucp is mapped already, that
 * one is used; path must then be empty or name the same file. With an empty path
 * only a mapped one is used, and the result is SLUICE_LOAD_ABSENT if there is none. */
int sluice_ucx_load(const char *path, char *why, size_t why_len);

/* A worker executes the commands of rings.h and produces its events, so that code
 * above the rings does not depend on whether a notification travels through NIXL
 * or as a bare active message. Memory, transfers and boards are answered with
 * SLUICE_MISSING. A backend parameter is a setting of UCX without its prefix "UCX_".
 *
 * A worker has no thread. The caller steps it, from any thread but one at a time. A
 * step works for a bounded time and returns what to do next; the caller then reads
 * the events. event_fd wakes a reader of events in another thread; it is -1 if the
 * caller reads them. NULL if memory is exhausted, no libucp is loaded, or an argument
 * is invalid. */
enum sluice_ucx_next {
  SLUICE_UCX_STOPPED, /* gone is 1, the worker is freed, the memory is the caller's again */
  SLUICE_UCX_MORE,    /* step again */
  SLUICE_UCX_WAIT,    /* armed: wait until sluice_ucx_fd is readable or a producer of commands wakes the caller */
  SLUICE_UCX_NAP      /* step again soon: the reader is behind, or the worker cannot be armed */
};
void *sluice_ucx_new(struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int event_fd);
int sluice_ucx_step(void *worker);
/* The event descriptor of the open worker, which owns it; -1 before. */
int sluice_ucx_fd(void *worker);

#endif
