//! Chat templates and tokenizers with the C ABI of `sluice_tokenizer.h`, which is the
//! documentation of every function here. No panic leaves the library.

mod bounds;
mod class;
mod convert;
mod encoder;
mod error;
mod json;
mod memory;
mod model;
mod render;
mod rewrite;
mod text;
mod value;

use std::ffi::{CStr, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use error::{Code, Error, Result};
use model::{Bounds, Model};
use render::Limits;

/// The version of the ABI: `SLUICE_TOK_ABI` of the header.
const ABI: u32 = 2;

/// `struct sluice_tok_result`.
#[repr(C)]
pub struct RawResult {
    data: *mut u8,
    len: usize,
    size: usize,
}

/// `struct sluice_tok_options`.
#[repr(C)]
pub struct Options {
    size: usize,
    max_input: u64,
    max_output: u64,
    flags: u64,
}

/// `struct sluice_tok_model`.
pub struct Handle(Model);

impl RawResult {
    fn give(&mut self, bytes: Vec<u8>) {
        let b = bytes.into_boxed_slice();
        self.len = b.len();
        self.size = b.len();
        self.data = Box::into_raw(b).cast();
    }
}

/// Runs a call and stores the text of its error.
fn guard(out: *mut RawResult, f: impl FnOnce(&mut RawResult) -> Result<()>) -> c_int {
    if out.is_null() {
        return Code::Argument as c_int;
    }
    // SAFETY: the header asks for a valid pointer.
    let out = unsafe { &mut *out };
    *out = RawResult { data: std::ptr::null_mut(), len: 0, size: 0 };
    let e = match catch_unwind(AssertUnwindSafe(|| f(out))) {
        Ok(Ok(())) => return Code::Ok as c_int,
        Ok(Err(e)) => e,
        // Dropping the payload of a panic can panic itself.
        Err(payload) => {
            std::mem::forget(payload);
            Error::new(Code::Panic, "the library panicked")
        }
    };
    let code = e.code as c_int;
    out.give(e.text.into_bytes());
    code
}

/// # Safety
/// data points to len bytes, or len is 0.
unsafe fn bytes<'a>(data: *const u8, len: usize) -> &'a [u8] {
    if len == 0 || data.is_null() {
        return &[];
    }
    // SAFETY: see above.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// # Safety
/// m is a model that is not closed, or null.
unsafe fn model<'a>(m: *const Handle) -> Result<&'a Model> {
    // SAFETY: see above.
    unsafe { m.as_ref() }.map(|h| &h.0).ok_or_else(|| Error::new(Code::Argument, "no model"))
}

#[unsafe(no_mangle)]
pub extern "C" fn sluice_tok_abi_version() -> u32 {
    ABI
}

#[unsafe(no_mangle)]
pub extern "C" fn sluice_tok_version() -> *const c_char {
    const TEXT: &CStr = c"0.1.0 (tokenizers 0.23.1, fastokens 0.3.5, minijinja 3.1.0)";
    TEXT.as_ptr()
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sluice_tok_free(r: *mut RawResult) {
    // SAFETY: the header asks for a result of this library.
    let Some(r) = (unsafe { r.as_mut() }) else { return };
    if !r.data.is_null() {
        // SAFETY: give or encode has made it from a boxed slice of bytes of this size.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(r.data, r.size)) });
    }
    *r = RawResult { data: std::ptr::null_mut(), len: 0, size: 0 };
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sluice_tok_load(dir: *const c_char, options: *const Options, handle: *mut *mut Handle, out: *mut RawResult) -> c_int {
    guard(out, |_| {
        if dir.is_null() || handle.is_null() {
            return Err(Error::new(Code::Argument, "no folder or no handle"));
        }
        // SAFETY: the header asks for valid pointers.
        let (dir, options) = unsafe {
            *handle = std::ptr::null_mut();
            (CStr::from_ptr(dir), options.as_ref())
        };
        let dir = dir.to_str().map_err(|_| Error::new(Code::Argument, "the folder's name is not UTF-8"))?;
        let mut bounds = Bounds { input: 32 << 20, output: 64 << 20, reference: false };
        if let Some(o) = options {
            if o.size < std::mem::size_of::<Options>() {
                return Err(Error::new(Code::Argument, "the options are those of another ABI"));
            }
            if o.flags > 1 {
                return Err(Error::new(Code::Argument, "unknown flags"));
            }
            bounds.reference = o.flags == 1;
            if o.max_input > 0 {
                bounds.input = o.max_input as usize;
            }
            if o.max_output > 0 {
                bounds.output = o.max_output as usize;
            }
        }
        let m = Box::new(Handle(Model::load(Path::new(dir), bounds)?));
        // SAFETY: checked above.
        unsafe { *handle = Box::into_raw(m) };
        Ok(())
    })
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sluice_tok_close(m: *mut Handle) {
    if m.is_null() {
        return;
    }
    // SAFETY: the header asks for a model that no call uses any more.
    let m = unsafe { Box::from_raw(m) };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(m))) {
        std::mem::forget(payload);
    }
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sluice_tok_info(m: *const Handle, what: u32, out: *mut RawResult) -> c_int {
    guard(out, |out| {
        // SAFETY: the header asks for it.
        let m = unsafe { model(m)? };
        let v = match what {
            0 => m.info().clone(),
            1 => m.added(),
            2 => m.spec().clone(),
            _ => return Err(Error::new(Code::Argument, "unknown information")),
        };
        out.give(v.to_string().into_bytes());
        Ok(())
    })
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sluice_tok_render(
    m: *const Handle,
    template: *const u8,
    template_len: usize,
    input: *const u8,
    input_len: usize,
    timeout_ns: u64,
    out: *mut RawResult,
) -> c_int {
    guard(out, |out| {
        // SAFETY: the header asks for it.
        let (m, template, input) = unsafe { (model(m)?, bytes(template, template_len), bytes(input, input_len)) };
        let template = std::str::from_utf8(template).map_err(|_| Error::input("the template is not UTF-8"))?;
        let deadline = (timeout_ns > 0).then(|| Instant::now() + Duration::from_nanos(timeout_ns));
        let limits = Limits { output: m.bounds.output, deadline };
        out.give(m.render(template, input, limits)?);
        Ok(())
    })
}

/// # Safety
/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sluice_tok_encode(
    m: *const Handle,
    text: *const u8,
    text_len: usize,
    flags: u32,
    dst: *mut u32,
    dst_cap: usize,
    out: *mut RawResult,
) -> c_int {
    guard(out, |out| {
        // SAFETY: the header asks for it.
        let (m, text) = unsafe { (model(m)?, bytes(text, text_len)) };
        if flags > 3 {
            return Err(Error::new(Code::Argument, "unknown flags"));
        }
        let ids = m.encode(text, flags & 1 != 0, flags & 2 != 0)?;
        give_ids(&ids, dst, dst_cap, out);
        Ok(())
    })
}

/// Stores ids in the caller's array if they fit, else in memory of the library.
fn give_ids(ids: &[u32], dst: *mut u32, dst_cap: usize, out: &mut RawResult) {
    if !dst.is_null() && ids.len() <= dst_cap {
        // SAFETY: the header asks for dst_cap elements.
        unsafe { std::ptr::copy_nonoverlapping(ids.as_ptr(), dst, ids.len()) };
    } else {
        out.give(ids.iter().flat_map(|id| id.to_ne_bytes()).collect());
    }
    out.len = ids.len();
}
