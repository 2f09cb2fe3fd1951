/* The state of the agent's thread: private to this folder. */
#ifndef SLUICE_AGENT_H
#define SLUICE_AGENT_H

#include "nixl/api.h"
#include "nixl/nixl.h"
#include "rings/driver.h"

#define MAX_REGIONS 1024u
#define MAX_PEERS 4096u
#define MAX_TRANSFERS 1024u
#define MAX_BOARDS 8u
#define MAX_DESCS (1u << 20)
#define SWEEP_WORDS 1024u /* words of a board checked in one iteration */
#define MAX_ARRIVALS 8u

struct region {
  uint64_t addr, len, dev;
  int type;
  int used;
  uint32_t generation;
};

struct peer {
  char *name;
  int dead;
  uint32_t generation;
};

struct transfer {
  uint64_t token;
  void *request;
  uint32_t peer; /* index */
  int ending;    /* its answer is published; only the release remains */
  uint32_t tries;
};

struct board {
  struct sluice_board *control;
  struct sluice_record *slots;
  uint64_t count;
  uint64_t cursor;
};

struct agent {
  struct rings rings;
  int wake_fd; /* a producer of commands wakes the thread with it */
  struct sluice_poll_intervals poll;
  const struct nixl_api *api;

  void *nixl;
  void *backend;
  void *options; /* names the backend */
  int telemetry;
  int own_progress; /* the library has no progress thread: every poll makes its progress */

  void *notifs; /* the library's map, which owns the strings read from it until it is cleared */
  size_t notif_agents, notif_agent, notif_next;
  int notifs_pending;
  int notif_errors;

  struct region regions[MAX_REGIONS];
  struct peer peers[MAX_PEERS];
  struct transfer transfers[MAX_TRANSFERS]; /* the first `live` are in use */
  uint32_t live;
  struct board boards[MAX_BOARDS];
  uint32_t board_count;

  int arrivals[MAX_ARRIVALS]; /* copies of the library's descriptors that become readable on arrivals */
  uint32_t arrival_count;
  enum { WOKEN, WOKEN_BY_TIME, WOKEN_BY_ARRIVAL } woken; /* what ended the last sleep */
  uint32_t spurious; /* consecutive wake-ups by a descriptor after which nothing was found */
  uint64_t max_wait; /* ns: longest wait on the descriptors while something is outstanding */
};

/* calls.c */
void agent_execute(struct agent *a, struct sluice_slot *c);
void agent_peer_down(struct agent *a, uint32_t index);
int agent_status(int status); /* maps an unknown status to SLUICE_GARBAGE */
void agent_release_all(struct agent *a);
struct peer *agent_peer(struct agent *a, uint64_t handle);

/* transfers.c */
void transfer_start(struct agent *a, struct sluice_slot *c);
void transfer_cancel(struct agent *a, struct sluice_slot *c);
int transfers_poll(struct agent *a);
void transfers_abandon(struct agent *a);

/* watch.c */
int notifs_poll(struct agent *a);
int boards_sweep(struct agent *a);

/* arrivals.c */
void *arrivals_before(void); /* a snapshot for arrivals_find, which frees it */
void arrivals_find(struct agent *a, void *before);
void arrivals_release(struct agent *a);

#endif
