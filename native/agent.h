/* The agent thread's own state: private to native/. */
#ifndef SLUICE_AGENT_H
#define SLUICE_AGENT_H

#include "nixl_api.h"
#include "sluice_native.h"

#define MAX_REGIONS 1024u
#define MAX_PEERS 4096u
#define MAX_TRANSFERS 1024u
#define MAX_BOARDS 8u
#define MAX_DESCS (1u << 20)
#define SWEEP_WORDS 1024u /* board words looked at in one pass */
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
  int ending;    /* its answer is out; only the release is left */
  uint32_t tries;
};

struct board {
  struct sluice_board *control;
  struct sluice_record *slots;
  uint64_t count;
  uint64_t cursor;
};

struct agent {
  struct sluice_shared *shared;
  struct sluice_slot *commands, *events;
  uint32_t cmd_mask, evt_mask;
  size_t spill; /* bytes beside each slot for a payload that does not fit; 0: it is allocated */
  int wake_fd, event_fd;
  struct sluice_pace pace;
  const struct nixl_api *api;

  void *nixl;
  void *backend;
  void *options; /* names the backend */
  int telemetry;
  int own_progress; /* the library has no thread for it */

  void *notifs; /* the library's map; borrowed strings live in it until it is cleared */
  size_t notif_agents, notif_agent, notif_next;
  int notifs_pending;
  int notif_errors;

  struct region regions[MAX_REGIONS];
  struct peer peers[MAX_PEERS];
  struct transfer transfers[MAX_TRANSFERS]; /* the first `live` are in use */
  uint32_t live;
  struct board boards[MAX_BOARDS];
  uint32_t board_count;

  int arrivals[MAX_ARRIVALS]; /* descriptors that tell when to look; copies */
  uint32_t arrival_count;
  enum { WOKEN, WOKEN_BY_TIME, WOKEN_BY_ARRIVAL } woken; /* from the last sleep */
  uint32_t barren;   /* times in a row that one was ready, and nothing was found */
  uint64_t patience; /* ns: the longest wait for them while something is outstanding */

  uint64_t now; /* CLOCK_MONOTONIC ns, of this pass */
  int pushed;   /* events since the reader was last woken */
  int stopping;
};

/* ring.c */
int agent_room(const struct agent *a);
struct sluice_slot *agent_next_event(struct agent *a); /* NULL when the ring is full */
void agent_publish(struct agent *a);
/* Copies n and m bytes into the event, beside it when they do not fit; 0 when there is no room. */
int event_payload(struct agent *a, struct sluice_slot *e, const void *p, size_t n, const void *q, size_t m);
struct sluice_slot *agent_next_command(struct agent *a);
void agent_command_done(struct agent *a, struct sluice_slot *c);
void agent_wake_reader(struct agent *a);
const unsigned char *command_payload(const struct agent *a, const struct sluice_slot *c);

/* calls.c */
void agent_execute(struct agent *a, struct sluice_slot *c);
void agent_answer(struct agent *a, uint64_t token, int status, uint64_t handle, const void *p, size_t n);
void agent_peer_down(struct agent *a, uint32_t index);
int agent_status(int status); /* garbage is named */
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
void *arrivals_before(void); /* for arrivals_find, which frees it */
void arrivals_find(struct agent *a, void *before);
void arrivals_release(struct agent *a);

/* agent.c. Lays an agent over the shared block, whose command ring is made empty. */
int agent_capacities(uint32_t commands, uint32_t events); /* 0 when a ring cannot have them */
void agent_lay(struct agent *a, struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int wake_fd,
               int event_fd);
int agent_thread(void *(*run)(void *), void *argument); /* starts it, detached; an errno */
uint64_t agent_clock(void); /* CLOCK_MONOTONIC, ns */
void agent_enter(struct agent *a, uint64_t op);
void agent_leave(struct agent *a);

#endif
