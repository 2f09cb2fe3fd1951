/* libnixl_capi: the loader, and the thread that owns a NIXL agent. */
#ifndef SLUICE_NIXL_H
#define SLUICE_NIXL_H

#include "rings/rings.h"

/* Loads libnixl_capi from path (a file, or a bare name for the loader's search)
 * and fills the function table. It may hang, as sluice_dl_load_in_thread.
 * Repeated calls for the loaded file return SLUICE_LOAD_OK. why receives the reason
 * of a failure, or the resolved file. */
int sluice_nixl_load(const char *path, char *why, size_t why_len);

enum sluice_create_flags {
  SLUICE_CREATE_PROGRESS = 1, /* NIXL's progress thread */
  SLUICE_CREATE_TELEMETRY = 2
};

struct sluice_desc {
  uint64_t addr;
  uint64_t len;
  uint64_t dev;
};

/* Payload of SLUICE_OP_TRANSFER: this, the descriptors (local, then remote), the
 * notification. */
struct sluice_transfer {
  uint8_t write; /* 0 read, 1 write */
  uint8_t local_type;
  uint8_t remote_type;
  uint8_t has_notif;
  uint32_t locals;
  uint32_t remotes;
  uint32_t notif_len;
};

/* The control block of a completion board, in memory that is not registered with
 * NIXL: this struct, one sluice_slot_cell per slot, one bit per slot in 64-bit words.
 * A set bit makes the thread check the slot; the thread clears the bit when it
 * reports the slot. */
struct sluice_board {
  uint64_t words; /* words of the bit set that were ever used */
  uint64_t pad[7];
};
struct sluice_slot_cell {
  uint64_t sequence; /* stored last, and loaded first */
  uint64_t nonce;
  uint64_t request;
  uint64_t last_bad; /* owned by the thread: the foreign sequence that it counted last */
};

/* The record that an engine writes into a slot, little endian. check is the
 * exclusive or of the other seven 64-bit words. sequence is the last word, so that
 * a write that lands in order lands it last. */
#define SLUICE_RECORD_VERSION 0x01424c53u /* "SLB" 1 */
struct sluice_record {
  uint32_t version;
  int32_t status;
  uint64_t nonce;
  uint64_t request;
  uint64_t bytes;
  uint64_t microseconds;
  uint32_t worker;
  uint32_t rank;
  uint64_t check;
  uint64_t sequence;
};

/* How the thread waits. */
struct sluice_poll_intervals {
  uint64_t spin_ns; /* it stays awake this long after the last event while a transfer is in flight */
  uint64_t busy_ns; /* then, and while a completion is outstanding that no descriptor signals, it polls this often */
  uint64_t idle_ns; /* longest sleep while nothing is outstanding */
};

/* Starts the thread of an agent over a shared block. Capacities are powers of two.
 * A payload that does not fit in its slot is in memory from sluice_alloc if spill is
 * 0. Otherwise it is in the slot's own spill bytes, which follow the slots in the
 * block (those of the commands, then those of the events); big then only marks that.
 * Two processes that map the block at different addresses need spill bytes. The
 * caller owns the memory and the descriptors, which must exist until gone is 1.
 * Returns 0 or an errno. */
int sluice_agent_start(struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int wake_fd, int event_fd,
                       const struct sluice_poll_intervals *poll);

#endif
