/* The driver's side of the rings: private to native/. A driver is the single
 * consumer of commands and the single producer of events. */
#ifndef SLUICE_RINGS_DRIVER_H
#define SLUICE_RINGS_DRIVER_H

#include "rings/rings.h"

struct rings {
  struct sluice_shared *shared;
  struct sluice_slot *commands, *events;
  uint32_t cmd_mask, evt_mask;
  size_t spill; /* bytes outside each slot for a payload that does not fit; 0: payloads are allocated */
  int event_fd; /* wakes the reader of events; -1: none */
  uint64_t now; /* CLOCK_MONOTONIC ns, read once per iteration of the driver */
  int pushed;   /* events since the reader was last woken */
  int stopping; /* SLUICE_OP_STOP was executed */
};

/* Reports whether rings of these capacities are possible: powers of two, at least
 * 2 commands and 4 events. */
int rings_capacities_valid(uint32_t commands, uint32_t events);
/* Lays the rings over a shared block and empties the command ring. */
void rings_init(struct rings *r, struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int event_fd);
uint64_t rings_clock(void); /* CLOCK_MONOTONIC, ns */

/* Event slots that are free. */
uint32_t rings_free_events(const struct rings *r);
/* The next event slot, zeroed; NULL if the ring is full. rings_publish hands it over. */
struct sluice_slot *rings_next_event(struct rings *r);
void rings_publish(struct rings *r);
/* Copies n and m bytes into an event, or next to it if they do not fit; 0 if they are too large. */
int rings_event_payload(struct rings *r, struct sluice_slot *e, const void *p, size_t n, const void *q, size_t m);
/* Publishes SLUICE_EV_DONE. It is lost if the ring is full, so drivers check for space before they execute a command. */
void rings_answer(struct rings *r, uint64_t token, int status, uint64_t handle, const void *p, size_t n);
/* Wakes the reader of events if it waits and there are new events. */
void rings_wake_reader(struct rings *r);

/* The next command; NULL if there is none. rings_command_done returns its slot. */
struct sluice_slot *rings_next_command(struct rings *r);
/* Reports whether a command is there, sequentially consistent with the asleep flag. */
int rings_command_waits(const struct rings *r);
void rings_command_done(struct rings *r, struct sluice_slot *c);
const unsigned char *rings_command_payload(const struct rings *r, const struct sluice_slot *c);

/* Record that the library is entered by an operation, and left. A watcher in Go
 * reads for how long a call has lasted, and in which operation. */
void rings_enter_library(struct rings *r, uint64_t op);
void rings_leave_library(struct rings *r);

#endif
