//! Counts what a call has allocated. A rendering that keeps too much is stopped, see `bounds.rs`: the steps
//! that minijinja counts say how much was made, not how much of it is still there.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use crate::bounds;
use crate::error::Code;

/// The system's allocator, with a count for each thread.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The bytes of this thread since `begin`. What another thread frees is not subtracted here, so the count
/// is exact only within a call, which stays on its thread.
struct Held {
    now: Cell<isize>,
    most: Cell<isize>,
}

thread_local! {
    // Neither needs memory or a destructor, so it can be used wherever memory is allocated.
    static HELD: Held = const { Held { now: Cell::new(0), most: Cell::new(isize::MAX) } };
}

/// Begins to count, up to most bytes.
pub fn begin(most: usize) {
    HELD.with(|h| {
        h.now.set(0);
        h.most.set(isize::try_from(most).unwrap_or(isize::MAX));
    });
}

pub fn end() {
    HELD.with(|h| h.most.set(isize::MAX));
}

/// Reports whether the call may hold n more bytes.
pub fn has_room(n: usize) -> bool {
    HELD.with(|h| h.now.get().saturating_add_unsigned(n) <= h.most.get())
}

#[inline]
fn add(n: isize) {
    HELD.with(|h| {
        let now = h.now.get().wrapping_add(n);
        h.now.set(now);
        if now > h.most.get() {
            // An allocator cannot refuse without ending the process; the next look at the bounds ends the call.
            bounds::fail(Code::Limit);
        }
    });
}

// SAFETY: every call is passed on as it is, and what is done besides neither allocates nor panics. No layout
// has more than isize::MAX bytes.
unsafe impl GlobalAlloc for Counting {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller keeps the rules of GlobalAlloc.
        unsafe { System.alloc(layout) }
    }
    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: see alloc.
        unsafe { System.alloc_zeroed(layout) }
    }
    #[inline]
    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        HELD.with(|h| h.now.set(h.now.get().wrapping_sub(layout.size() as isize)));
        // SAFETY: see alloc.
        unsafe { System.dealloc(p, layout) }
    }
    #[inline]
    unsafe fn realloc(&self, p: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as isize - layout.size() as isize);
        // SAFETY: see alloc.
        unsafe { System.realloc(p, layout, size) }
    }
}
