/* The flat C surface of Sluice. Own types only, no third-party header.
 *
 * Three parts: libraries (found and filled by dlopen), the agent thread (one per
 * NIXL agent, driven by two rings in memory that the caller maps), and the CUDA
 * driver (memory on a GPU). Nothing here aborts, and nothing links against NIXL,
 * UCX or CUDA. */
#ifndef SLUICE_NATIVE_H
#define SLUICE_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ABI of this surface; grows by one at each incompatible change. */
#define SLUICE_NATIVE_ABI 4

/* The ABI the library was compiled with. */
int sluice_native_abi(void);

/* Says whether a shared library is in this process already: 1 yes, 0 no,
 * -1 for a NULL or empty name. It never loads anything, and so runs no foreign
 * constructor and changes no signal handler. */
int sluice_native_resident(const char *soname);

/* ---- libraries ---------------------------------------------------------- */

enum sluice_load {
  SLUICE_LOAD_OK = 0,
  SLUICE_LOAD_ABSENT = 1,  /* no such file, here or on the loader's path */
  SLUICE_LOAD_BROKEN = 2,  /* a file that the loader refuses, or that needs what is not here */
  SLUICE_LOAD_SYMBOL = 3,  /* a required symbol is missing: too old, or another library */
  SLUICE_LOAD_TOO_NEW = 4, /* a major version that this code does not know */
  SLUICE_LOAD_STUB = 5,    /* NIXL's stub, which aborts when it is called */
  SLUICE_LOAD_OTHER = 6,   /* another file of the kind is loaded; one per process */
  SLUICE_LOAD_THREAD = 7   /* the loading thread could not be started */
};

/* Loads libnixl_capi from path (a file, or a bare name for the loader's search)
 * and fills the function table. It runs in a thread of its own with all signals
 * blocked, because the library's threads inherit that mask, and it waits for that
 * thread: a library that hangs in its constructors hangs this call, so call it
 * where that costs nothing. Repeated calls for the loaded file answer OK.
 * In why: what was wrong, or the resolved file on success. */
int sluice_nixl_load(const char *path, char *why, size_t why_len);

/* Sets what UCX must be told before its first load (over any value of the
 * environment): no signal for its debugger, no fault handlers, no patches in
 * libc's memory calls. Idempotent. sluice_nixl_load calls it too. */
void sluice_ucx_environment(void);

/* Remembers the signal handlers of the process. Called before a load. */
void sluice_signals_remember(void);

/* Compares with what was remembered: each handler that now lies in a shared
 * library that had none there is put back. The result is a bit set of the
 * signals 1..63 that had been taken. */
uint64_t sluice_signals_restore(void);

/* UCX's version, asked of the libucp that is resident at path; 0 when it is not. */
int sluice_ucx_version(const char *path, unsigned *major, unsigned *minor, unsigned *patch);

/* Loads libucp, as sluice_nixl_load does with NIXL. When one is in the process
 * already, that one is taken: path must then be empty or name the same file. An
 * empty path takes what is there, and answers ABSENT when there is none. */
int sluice_ucx_load(const char *path, char *why, size_t why_len);
int sluice_ucx_load_here(const char *path, char *why, size_t why_len); /* in this thread, under the caller's lock */

/* ---- the agent thread --------------------------------------------------- */

#define SLUICE_SLOT 256u         /* bytes of a ring slot */
#define SLUICE_INLINE 184u       /* payload bytes that fit in a slot */
#define SLUICE_BIG_MAX (64u << 20) /* bytes of a payload outside of its slot */

enum sluice_op {
  SLUICE_OP_CREATE = 1, /* arg0 flags, arg1 progress delay in us; payload: name NUL */
  SLUICE_OP_BACKEND,    /* payload: plugin NUL (key NUL value NUL)* ; answer: "key=value\n"* */
  SLUICE_OP_PLUGINS,    /* answer: "name\n"* */
  SLUICE_OP_REGISTER,   /* arg0 address, arg1 bytes, arg2 device | type << 32; answer: handle */
  SLUICE_OP_DEREGISTER, /* handle: region */
  SLUICE_OP_METADATA,   /* answer: the blob */
  SLUICE_OP_LOAD,       /* payload: blob; answer: handle and the peer's name */
  SLUICE_OP_INVALIDATE, /* handle: peer */
  SLUICE_OP_CHECK,      /* handle: peer */
  SLUICE_OP_CONNECT,    /* handle: peer */
  SLUICE_OP_NOTIFY,     /* handle: peer; payload: message; answered when a token is given or it failed */
  SLUICE_OP_TRANSFER,   /* handle: peer; payload: struct sluice_transfer and what it counts */
  SLUICE_OP_CANCEL,     /* handle: token of a transfer */
  SLUICE_OP_BOARD,      /* arg0 control block, arg1 slots, arg2 number of slots */
  SLUICE_OP_STOP,       /* everything is released; the thread ends after its answer */
  SLUICE_OP_LAST = SLUICE_OP_STOP
};

enum sluice_event {
  SLUICE_EV_DONE = 1, /* the answer to token: status, handle, args, payload */
  SLUICE_EV_NOTIF,    /* a notification: payload is sender (aux bytes), then message */
  SLUICE_EV_PEER_DOWN,/* handle: a peer that refused a send or a transfer */
  SLUICE_EV_BOARD     /* handle: slot, arg0: board; payload: the record that fits the slot's ticket, as it was compared */
};

/* Statuses: NIXL's own from 0 downwards, ours from -100. */
enum sluice_status {
  SLUICE_NIXL_SUCCESS = 0,
  SLUICE_NIXL_IN_PROG = 1,
  SLUICE_NIXL_INVALID_PARAM = -1,
  SLUICE_NIXL_BACKEND = -2,
  SLUICE_NIXL_INVALID_STATE = -3,
  SLUICE_NIXL_EXCEPTION = -4,
  SLUICE_NIXL_NO_TELEMETRY = -5,
  SLUICE_NIXL_NOT_FOUND = -6,
  SLUICE_GARBAGE = -100,   /* the library's answer makes no sense */
  SLUICE_NO_AGENT = -101,  /* CREATE and BACKEND come first */
  SLUICE_BAD_HANDLE = -102,/* no such region, peer or transfer */
  SLUICE_BAD_PAYLOAD = -103,
  SLUICE_FULL = -104,      /* a table of ours is full */
  SLUICE_PEER_DEAD = -105, /* the peer failed before; load it again */
  SLUICE_CANCELED = -106,
  SLUICE_MISSING = -107,   /* the library lacks this call */
  SLUICE_VERSION = -110,   /* the peer's version is known not to fit */
  SLUICE_UCX_ERROR = -200  /* and below: UCX's own (negative) status added to it */
};

enum sluice_create_flags {
  SLUICE_CREATE_PROGRESS = 1, /* NIXL's progress thread */
  SLUICE_CREATE_TELEMETRY = 2
};

/* One command or event. seq is used by the command ring alone. A payload longer
 * than SLUICE_INLINE lies at big, from sluice_alloc; the reader frees it. */
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

/* The head of the shared block; the command slots follow, then the event slots.
 *
 * Memory order. Commands are a bounded queue of many producers and one consumer
 * (after Vyukov): a producer takes the place cmd_tail by compare-and-swap when
 * the slot's seq equals it, fills the slot, and publishes with a release store of
 * seq = place + 1; the consumer reads seq with acquire, and gives the slot back
 * with a release store of seq = place + capacity. Events are a queue of one
 * producer and one consumer: evt_tail is stored with release after the slot is
 * filled, evt_head with release after it was read; each side reads the other's
 * counter with acquire. The sleep flags are Dekker's: the sleeper stores its flag,
 * then reads the ring; the waker publishes, then reads the flag; all four
 * sequentially consistent, so that not both miss. */
struct sluice_shared {
  uint64_t cmd_tail;
  uint64_t pad0[7];
  uint64_t cmd_head; /* the thread's own, here for inspection */
  uint64_t pad1[7];
  uint64_t evt_tail;
  uint64_t pad2[7];
  uint64_t evt_head;
  uint64_t pad3[7];
  uint32_t asleep;  /* the thread waits on wake_fd */
  uint32_t waiting; /* the reader of events waits on event_fd */
  uint64_t pad4[7];
  uint64_t outstanding; /* completions the caller waits for: the thread stays awake */
  uint64_t pad5[7];
  uint64_t busy_since; /* CLOCK_MONOTONIC ns when the library was entered; 0 outside of it */
  uint64_t busy_op;
  uint64_t beats;      /* passes of the loop */
  uint64_t foreign;    /* records on boards that match no ticket */
  uint64_t unread;     /* notifications dropped: too long, or of a nameless sender */
  uint64_t signals;    /* handlers put back, as sluice_signals_restore */
  uint64_t gone;       /* 1 when the thread has ended */
  uint64_t stuck;      /* transfers that the library would not release */
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

/* A completion board's control block (never registered with NIXL): this, one
 * sluice_ticket per slot, one bit per slot in 64-bit words. A set bit asks the
 * thread to look at the slot; it clears the bit when it has reported it. */
struct sluice_board {
  uint64_t words; /* words of the bit set that were ever used */
  uint64_t pad[7];
};
struct sluice_ticket {
  uint64_t sequence; /* stored last, and loaded first */
  uint64_t nonce;
  uint64_t request;
  uint64_t last_bad; /* the thread's: a foreign sequence counted already */
};

/* The record that is written into a slot. Little endian. check is the exclusive
 * or of the other seven 64-bit words; sequence is last, so that it lands last
 * where a write lands in order. */
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

struct sluice_pace {
  uint64_t spin_ns; /* stay awake this long after the last event while a transfer of ours is under way */
  uint64_t busy_ns; /* then, and while a completion is outstanding that no descriptor tells of, sleep this long between looks */
  uint64_t idle_ns; /* longest sleep when nothing is outstanding */
};

/* Starts a thread over a shared block. capacities are powers of two. A payload that
 * does not fit in its slot lies in memory from sluice_alloc, or, with spill above 0, in
 * the slot's own spill bytes, which follow the slots in the block (those of the commands,
 * then those of the events): so with a block that two processes map at one address,
 * and big then only says that it lies there. The thread owns neither the memory nor
 * the descriptors; both must outlive it: watch gone. 0, or an errno. */
int sluice_agent_start(struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int wake_fd, int event_fd,
                       const struct sluice_pace *pace);

/* The same over UCX alone: the same commands and events, and a UCP worker. What is
 * notified are active messages; memory, transfers and boards are answered MISSING.
 * A backend parameter is a setting of UCX without its "UCX_".
 *
 * It has no thread of its own: a caller steps it, from any thread but from one at a
 * time. A step works a bounded while and says what is to be done next; after it the
 * events are read. Whoever reads them elsewhere is woken by event_fd, as from the agent's thread;
 * -1 where the caller does. NULL when memory lacks, no libucp is loaded, or an
 * argument is wrong. */
enum sluice_ucx_next {
  SLUICE_UCX_STOPPED, /* gone is 1, worker is freed, the memory is the caller's again */
  SLUICE_UCX_MORE,    /* step again */
  SLUICE_UCX_WAIT,    /* armed: wait until sluice_ucx_fd can be read or the producer of a command wakes */
  SLUICE_UCX_NAP      /* step again in a moment: the reader is behind, or the worker cannot be armed */
};
void *sluice_ucx_new(struct sluice_shared *shared, uint32_t cmd_capacity, uint32_t evt_capacity, uint32_t spill, int event_fd);
int sluice_ucx_step(void *worker);
int sluice_ucx_fd(void *worker); /* of the open worker, its own; else -1 */

/* Memory for big payloads. */
void *sluice_alloc(size_t n);
void sluice_free(void *p);

/* ---- the CUDA driver ---------------------------------------------------- */

/* Loads libcuda.so.1 and makes the primary context of the device current in the
 * calls below. 0, or a negative CUresult, or a sluice_load code; why is filled. */
int sluice_cuda_open(int device, char *why, size_t why_len);
int sluice_cuda_count(int *devices, char *why, size_t why_len);
/* Makes the device's context current in the calling thread; a CUresult. */
int sluice_cuda_bind(int device);
int sluice_cuda_driver(int *version);
int sluice_cuda_alloc(int device, size_t bytes, uint64_t *address);
int sluice_cuda_free(int device, uint64_t address);
int sluice_cuda_write(int device, uint64_t to, const void *from, size_t bytes);
int sluice_cuda_read(int device, void *to, uint64_t from, size_t bytes);

#ifdef __cplusplus
}
#endif
#endif
