/* The memory that Go and a library's driver share: a command ring, an event ring,
 * and the operations, events and statuses that travel over them. nixl.h and ucx.h
 * each declare a driver behind these rings. Layouts are mirrored in Go
 * (nixl/ring.go) and compared by a test. */
#ifndef SLUICE_RINGS_H
#define SLUICE_RINGS_H

#include <stddef.h>
#include <stdint.h>

#define SLUICE_SLOT 256u         /* bytes of a ring slot */
#define SLUICE_INLINE 184u       /* payload bytes that fit in a slot */
#define SLUICE_BIG_MAX (64u << 20) /* largest payload outside its slot, in bytes */

enum sluice_op {
  SLUICE_OP_CREATE = 1, /* arg0 flags, arg1 progress delay in us; payload: name NUL */
  SLUICE_OP_BACKEND,    /* payload: plugin NUL (key NUL value NUL)*; answer: "key=value\n"* */
  SLUICE_OP_PLUGINS,    /* answer: "name\n"* */
  SLUICE_OP_REGISTER,   /* arg0 address, arg1 bytes, arg2 device | type << 32; answer: handle */
  SLUICE_OP_DEREGISTER, /* handle: region */
  SLUICE_OP_METADATA,   /* answer: the blob */
  SLUICE_OP_LOAD,       /* payload: blob; answer: handle and the peer's name */
  SLUICE_OP_INVALIDATE, /* handle: peer */
  SLUICE_OP_CHECK,      /* handle: peer */
  SLUICE_OP_CONNECT,    /* handle: peer */
  SLUICE_OP_NOTIFY,     /* handle: peer; payload: message; answered if token is not 0 */
  SLUICE_OP_TRANSFER,   /* handle: peer; payload: struct sluice_transfer and the parts it counts */
  SLUICE_OP_CANCEL,     /* handle: token of a transfer */
  SLUICE_OP_BOARD,      /* arg0 control block, arg1 slots, arg2 number of slots */
  SLUICE_OP_STOP,       /* everything is released; the driver ends after its answer */
  SLUICE_OP_LAST = SLUICE_OP_STOP
};

enum sluice_event {
  SLUICE_EV_DONE = 1, /* the answer to token: status, handle, args, payload */
  SLUICE_EV_NOTIF,    /* a notification: the payload is the sender (aux bytes), then the message */
  SLUICE_EV_PEER_DOWN,/* handle: a peer that rejected a send or a transfer */
  SLUICE_EV_BOARD     /* handle: slot, arg0: board; payload: the record that matches the slot's cell, as it was compared */
};

/* Statuses: NIXL's own from 0 downwards, Sluice's from -100. */
enum sluice_status {
  SLUICE_NIXL_SUCCESS = 0,
  SLUICE_NIXL_IN_PROG = 1,
  SLUICE_NIXL_INVALID_PARAM = -1,
  SLUICE_NIXL_BACKEND = -2,
  SLUICE_NIXL_INVALID_STATE = -3,
  SLUICE_NIXL_EXCEPTION = -4,
  SLUICE_NIXL_NO_TELEMETRY = -5,
  SLUICE_NIXL_NOT_FOUND = -6,
  SLUICE_GARBAGE = -100,   /* the library's result is inconsistent, such as success without an object */
  SLUICE_NO_AGENT = -101,  /* CREATE and BACKEND must come first */
  SLUICE_BAD_HANDLE = -102,/* no such region, peer or transfer */
  SLUICE_BAD_PAYLOAD = -103,
  SLUICE_FULL = -104,      /* a table of the driver is full */
  SLUICE_PEER_DEAD = -105, /* the peer failed before; load it again */
  SLUICE_CANCELED = -106,
  SLUICE_MISSING = -107,   /* the library lacks this call */
  SLUICE_VERSION = -110,   /* the peer's version is known to be incompatible */
  SLUICE_UCX_ERROR = -200  /* and below: UCX's own (negative) status added to it */
};

/* One command or event. Only the command ring uses seq. A payload longer than
 * SLUICE_INLINE is at the address in big, in memory from sluice_alloc, and the
 * reader frees it. */
struct sluice_slot {
  uint64_t seq;
  uint32_t op;
  uint32_t len;
  uint64_t token;
  uint64_t handle;
  uint64_t big;
  int32_t status;
  uint32_t aux;
  uint64_t arg[3];
  unsigned char data[SLUICE_INLINE];
};

/* The head of the shared block. The command slots follow it, then the event slots,
 * then the spill bytes of both.
 *
 * Memory order. Commands are a bounded queue of many producers and one consumer
 * (after Vyukov). A producer claims the place cmd_tail by compare-and-swap if the
 * slot's seq equals it, fills the slot, and publishes with a release store of
 * seq = place + 1. The consumer reads seq with acquire, and returns the slot with a
 * release store of seq = place + capacity. Events are a queue of one producer and
 * one consumer: evt_tail is stored with release after the slot is filled, evt_head
 * with release after the slot was read; each side reads the other's counter with
 * acquire. The sleep flags follow Dekker: the sleeper stores its flag, then reads
 * the ring; the waker publishes, then reads the flag. All four accesses are
 * sequentially consistent, so at least one side sees the other. */
struct sluice_shared {
  uint64_t cmd_tail;
  uint64_t pad0[7];
  uint64_t cmd_head; /* written by the driver only; here for inspection */
  uint64_t pad1[7];
  uint64_t evt_tail;
  uint64_t pad2[7];
  uint64_t evt_head;
  uint64_t pad3[7];
  uint32_t asleep;  /* the driver waits on wake_fd */
  uint32_t waiting; /* the reader of events waits on event_fd */
  uint64_t pad4[7];
  uint64_t outstanding; /* completions the caller waits for; above 0 the driver stays awake */
  uint64_t pad5[7];
  uint64_t busy_since; /* CLOCK_MONOTONIC ns at which the driver entered the library; 0 outside it */
  uint64_t busy_op;
  uint64_t beats;      /* iterations of the driver's loop */
  uint64_t foreign;    /* records on boards that match no cell */
  uint64_t unread;     /* notifications dropped: too long, or from a sender without a name */
  uint64_t signals;    /* restored handlers, as sluice_signals_restore returns them */
  uint64_t gone;       /* 1 once the driver has ended and touches nothing of the caller's */
  uint64_t stuck;      /* transfers that the library would not release */
};

/* Memory for payloads outside their slots, from malloc. */
void *sluice_alloc(size_t n);
void sluice_free(void *p);

#endif
