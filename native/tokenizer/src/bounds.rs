//! What keeps a template within its bounds, wherever it is from: one can come from an engine.
//!
//! minijinja counts steps (fuel), but an operation on a value whose size doubles at each step, or on one
//! that is nested without end, is one step of any duration, and too deep a value or expression overflows
//! the stack, which ends the process. So
//!
//! - `rewrite` refuses templates with expressions that nest or chain too much, passes every value that
//!   outlives its expression through `BOUND` or `ATTRIBUTE`, and
//!   what can make a large value through `OPERAND` or `INPUT`;
//! - `Bounder` makes of such a value one of `value.rs`, which knows its depth and its size, and refuses what
//!   is too deep, too large or could contain itself;
//! - those values, loops, macros, methods and writes call `work`, which looks at the clock;
//! - `memory.rs` counts the bytes that the call holds, and stops it at `max_memory`.

use std::cell::Cell;
use std::time::Instant;

use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Tuple, Value, ValueIter, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, State};

use crate::error::Code;
use crate::memory;
use crate::value::{Dict, Key, List, Pairs, Size, is_tuple};

pub type Jinja<T> = std::result::Result<T, JinjaError>;

/// The depth of a value that outlives its expression. It is above that of a request's JSON.
const MAX_DEPTH: usize = 256;

/// What such a value weighs, see `Size`, in a request without bytes.
const MAX_WEIGHT: usize = 1 << 20;

/// The bytes of such a string, in a request without bytes.
const MAX_TEXT: usize = 16 << 20;

/// The filters that `rewrite` adds.
pub const BOUND: &str = "__bound";
pub const ATTRIBUTE: &str = "__attribute";
pub const EACH: &str = "__each";
pub const STEP: &str = "__step";
pub const OPERAND: &str = "__operand";
pub const INPUT: &str = "__input";
pub const FACTOR: &str = "__factor";

/// What the functions and values of a template need of the call, which runs on one thread.
#[derive(Clone, Copy)]
pub struct Call {
    pub now: Option<i64>,
    pub output: usize,
    pub size: usize,
    pub deadline: Option<Instant>,
}

thread_local! {
    static CALL: Cell<Option<Call>> = const { Cell::new(None) };
    static FAILED: Cell<Option<Code>> = const { Cell::new(None) };
    static WORK: Cell<u32> = const { Cell::new(0) };
    static BYTES: Cell<usize> = const { Cell::new(0) };
}

/// The bytes that may be read of strings in lists and dictionaries, in a request without bytes. What converts
/// a list to a text may use as much memory.
const MAX_BYTES: usize = 256 << 20;

/// The memory that a rendering may hold beside the request and the text that it writes. Templates of real models
/// hold less than the request has bytes, with some kilobytes for each message.
fn max_memory(size: usize) -> usize {
    (256 << 20) + 16 * size.min(1 << 40)
}

/// Looking at the clock takes as long as this many units of work, of some nanoseconds each.
const CLOCK: u32 = 256;

/// The work of a step of a loop, a method or a filter beside what it does with bytes.
pub const STEP_WORK: u32 = 32;

/// The work of reading an item of a list or a dictionary. A loop does more with it than to read it.
const READ_WORK: u32 = 8;

/// Notes work and returns whether the call may go on. Once it may not, every further answer is no, so that
/// what cannot return an error ends soon.
#[inline]
pub fn work(n: u32) -> bool {
    WORK.with(|w| {
        let sum = w.get().saturating_add(n);
        w.set(sum);
        sum < CLOCK || look(w)
    })
}

#[cold]
fn look(w: &Cell<u32>) -> bool {
    if FAILED.get().is_some() {
        w.set(CLOCK);
        return false;
    }
    if CALL.get().and_then(|c| c.deadline).is_some_and(|d| Instant::now() > d) {
        fail(Code::Deadline);
        return false;
    }
    w.set(0);
    true
}

/// Notes that a value was read of a list or a dictionary, and returns it if the call may go on.
#[inline]
pub fn read(v: &Value) -> Option<Value> {
    let n = match v.as_str() {
        Some(s) if s.len() > 64 => s.len(),
        _ => return work(READ_WORK).then(|| v.clone()),
    };
    let sum = BYTES.get().saturating_add(n);
    BYTES.set(sum);
    if sum > MAX_BYTES && sum > MAX_BYTES + call().map_or(0, |c| 64 * c.size) {
        fail(Code::Limit);
    }
    work(READ_WORK).then(|| v.clone())
}

/// Ends the call with an error.
pub fn fail(code: Code) {
    FAILED.set(FAILED.get().or(Some(code)));
    WORK.set(CLOCK);
}

/// Like `work`, in functions that can fail.
pub fn check(n: u32) -> Jinja<()> {
    if work(n) { Ok(()) } else { Err(stopped()) }
}

fn stopped() -> JinjaError {
    JinjaError::new(ErrorKind::WriteFailure, "the rendering was stopped")
}

/// Charges an operation on a text, of some nanoseconds for each byte: a step takes about 100. minijinja charges a
/// step for 64 bytes, as if they were only copied.
pub fn charge(state: &State, bytes: usize) -> Jinja<()> {
    check_bytes(bytes)?;
    state.consume_fuel(bytes as u64 / 8)
}

/// Looks at the clock after an operation on a text.
pub fn check_bytes(bytes: usize) -> Jinja<()> {
    check(STEP_WORK + (bytes / 64).min(CLOCK as usize) as u32)
}

/// Ends the call if it cannot hold n more bytes, before an operation makes them.
pub fn reserve(n: usize) -> Jinja<()> {
    if !memory::has_room(n) {
        fail(Code::Limit);
        return Err(stopped());
    }
    Ok(())
}

pub fn begin(call: Call) {
    CALL.set(Some(call));
    FAILED.set(None);
    WORK.set(0);
    BYTES.set(0);
    memory::begin(max_memory(call.size));
}

/// Ends the call and returns why it was stopped.
pub fn end() -> Option<Code> {
    memory::end();
    CALL.set(None);
    WORK.set(0);
    FAILED.take()
}

pub fn call() -> Option<Call> {
    CALL.get()
}

/// Adds the filters and functions that bound values.
pub fn install(env: &mut Environment<'static>) {
    env.add_filter(BOUND, |state: &State, v: Value| bound(state, v, false));
    env.add_filter(ATTRIBUTE, |state: &State, v: Value| bound(state, v, true));
    env.add_filter(EACH, each);
    env.add_filter(OPERAND, |v: Value| operand(v, 2));
    env.add_filter(INPUT, |v: Value| operand(v, 32)); // a filter can make a list of the characters of a text
    env.add_filter(FACTOR, factor);
    env.add_filter("list", list);
    env.add_filter("batch", |state: &State, v: Value, count: usize, fill: Option<Value>| {
        reserve(count.saturating_mul(SLOT))?;
        minijinja::filters::batch(state, v, count, fill)
    });
    env.add_filter("slice", |state: &State, v: Value, count: usize, fill: Option<Value>| {
        reserve(count.saturating_mul(4 * SLOT))?;
        minijinja::filters::slice(state, v, count, fill)
    });
    env.add_filter("sum", |state: &State, v: Value, attribute: Option<&str>, start: Option<Value>, kwargs: minijinja::value::Kwargs| {
        // Adding texts or lists takes time with the square of their number.
        if start.is_some() || kwargs.has("start") {
            return Err(forbidden("a sum has no start"));
        }
        minijinja::filters::sum(state, v, attribute, start, kwargs)
    });
    env.add_filter(STEP, |v: Value| check(CLOCK).map(|()| v)); // a slice with a step walks over all characters
    // A namespace is the only value that changes, so what it holds must not hold one.
    env.add_function("namespace", |state: &State, v: Option<minijinja::value::ValueOrKwargs>| {
        let v = match v.map(|v| v.into_value()) {
            Some(v) if v.kind() == ValueKind::Map => Some(bound(state, v, true)?),
            v => v,
        };
        minijinja::functions::namespace(v.map(Into::into))
    });
    env.add_function("dict", |state: &State, v: Option<Value>, more: minijinja::value::Kwargs| {
        bound(state, minijinja::functions::dict(v, more)?, false)
    });
    // It prints the variables for developers, at a cost that grows with the square of their depth.
    env.remove_global("debug");
}

/// An error about a bound, of the kind that the end of the steps has.
fn too_much(what: &str) -> JinjaError {
    JinjaError::new(ErrorKind::OutOfFuel, what.to_string())
}

/// An error about what a template may not do.
fn forbidden(what: &str) -> JinjaError {
    JinjaError::new(ErrorKind::InvalidOperation, what.to_string())
}

/// Bounds a value that outlives its expression. member says that it becomes part of another one.
fn bound(state: &State, v: Value, member: bool) -> Jinja<Value> {
    check(STEP_WORK)?;
    match v.kind() {
        ValueKind::String => {
            let n = v.as_str().map_or(0, str::len);
            let max = call().map_or(MAX_TEXT, |c| MAX_TEXT.max(2 * c.size));
            if n > max {
                return Err(too_much(&format!("a text has more than {max} bytes")));
            }
            state.consume_fuel(n as u64 / 64)?;
            Ok(v)
        }
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            let max = max_weight();
            let mut b = Bounder { state, left: max };
            let v = b.value(v, 0, member)?;
            let size = Size::of(&v);
            if size.depth > MAX_DEPTH {
                return Err(too_much("a value is nested too deeply"));
            }
            if size.weight > max {
                return Err(too_much("a value has too many items"));
            }
            Ok(v)
        }
        _ => Ok(v),
    }
}

fn max_weight() -> usize {
    call().map_or(MAX_WEIGHT, |c| MAX_WEIGHT + c.size)
}

struct Bounder<'a, 'b, 'c> {
    state: &'a State<'b, 'c>,
    /// Items that may still be copied.
    left: usize,
}

impl Bounder<'_, '_, '_> {
    fn value(&mut self, v: Value, depth: usize, member: bool) -> Jinja<Value> {
        let Some(o) = v.as_object() else { return Ok(v) };
        if o.is::<List>() || o.is::<Dict>() || o.is::<Pairs>() {
            return Ok(v);
        }
        if depth > MAX_DEPTH {
            return Err(too_much("a value is nested too deeply"));
        }
        match o.repr() {
            ObjectRepr::Plain => Ok(v),
            ObjectRepr::Seq | ObjectRepr::Iterable => {
                let is_tuple = is_tuple(o);
                let items = self.items(v.try_iter()?, depth)?;
                Ok(if is_tuple { self.tuple(items)? } else { Value::from_object(List::new(items)) })
            }
            ObjectRepr::Map => {
                if stateful(o) {
                    return if member || depth > 0 { Err(forbidden("a namespace or a loop cannot be part of another value")) } else { Ok(v) };
                }
                self.map(o, depth)
            }
            _ => Err(forbidden("a value of this kind cannot be kept")),
        }
    }

    fn items(&mut self, iter: ValueIter, depth: usize) -> Jinja<Vec<Value>> {
        let mut items = Vec::new();
        for x in iter.checked() {
            self.take()?;
            items.push(self.value(x?, depth + 1, true)?);
        }
        self.state.consume_fuel(items.len() as u64 / 2)?; // as minijinja charges lists
        Ok(items)
    }

    fn take(&mut self) -> Jinja<()> {
        check(1)?;
        self.left = self.left.checked_sub(1).ok_or_else(|| too_much("a value has too many items"))?;
        Ok(())
    }

    /// Tuples stay minijinja's own, which do not call `work`, so one must be quick to walk.
    fn tuple(&mut self, items: Vec<Value>) -> Jinja<Value> {
        const MAX: usize = 1000;
        let v = Value::from(Tuple::from(items));
        if tuple_items(&v) > MAX {
            return Err(too_much("a tuple has too many items"));
        }
        Ok(v)
    }

    fn map(&mut self, o: &DynObject, depth: usize) -> Jinja<Value> {
        let mut pairs = Vec::new();
        for (k, x) in o.try_iter_pairs().into_iter().flatten() {
            self.take()?;
            pairs.push((self.value(k, depth + 1, true)?, self.value(x, depth + 1, true)?));
        }
        self.state.consume_fuel(pairs.len() as u64)?;
        if pairs.iter().any(|(k, _)| k.as_str().is_none()) {
            return Ok(Value::from_object(Pairs::new(pairs)));
        }
        let mut d = Dict::default();
        for (k, x) in pairs {
            d.insert_key(Key::new(k.as_str().unwrap_or_default()), x);
        }
        Ok(Value::from_object(d))
    }
}

/// Counts the items of a tuple and of tuples in it.
fn tuple_items(v: &Value) -> usize {
    match v.downcast_object_ref::<Tuple>() {
        Some(t) => t.iter().map(tuple_items).fold(1, usize::saturating_add),
        None => 1,
    }
}

/// Reports whether an object changes during a rendering.
fn stateful(o: &DynObject) -> bool {
    let name = o.type_name();
    ["Namespace", "Loop", "Module"].iter().any(|n| name.ends_with(n))
}

/// The memory of an item of a list, with what a list of items grows by.
const SLOT: usize = 64;

/// An operand of `+` or `~`, or the input of a filter that can make a large value: of times bytes for each byte of a
/// text. Many of them in one expression make as many values, which no other bound looks at before its end.
fn operand(v: Value, times: usize) -> Jinja<Value> {
    check(STEP_WORK)?;
    match v.kind() {
        ValueKind::String => reserve(times * v.as_str().map_or(0, str::len))?,
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => {
            let n = v.len().unwrap_or(0);
            if n > max_weight() {
                return Err(too_much("a value has too many items"));
            }
            reserve(SLOT.saturating_mul(n))?;
        }
        _ => {}
    }
    Ok(v)
}

/// Jinja's `list`.
fn list(v: Value) -> Jinja<Value> {
    let mut items = Vec::new();
    match v.as_str() {
        Some(s) => {
            for c in s.chars() {
                check(1)?;
                items.push(Value::from(c));
            }
        }
        None if v.is_undefined() => {}
        None => {
            for x in v.try_iter()?.checked() {
                check(1)?;
                items.push(x?);
            }
        }
    }
    Ok(Value::from_object(List::new(items)))
}

/// An operand of `*`. minijinja repeats a list without making one, so that no bound but that of 100 million
/// items holds for what reads it.
fn factor(v: Value) -> Jinja<Value> {
    check(STEP_WORK)?;
    match v.kind() {
        ValueKind::Seq | ValueKind::Iterable => Err(forbidden("lists cannot be multiplied")),
        _ => Ok(v),
    }
}

/// What a loop iterates over, with a look at the clock.
fn each(v: Value) -> Jinja<Value> {
    check(STEP_WORK)?;
    if v.kind() == ValueKind::String {
        return list(v); // minijinja's loop over a string does not know its length
    }
    Ok(match v.as_object() {
        Some(o) if o.is::<List>() => v, // its items are counted as they are read
        Some(o) if o.repr() != ObjectRepr::Plain => Value::from_object(Each(v)),
        _ => v,
    })
}

#[derive(Debug)]
struct Each(Value);

struct EachIter(ValueIter, bool);

impl Iterator for EachIter {
    type Item = Value;
    fn next(&mut self) -> Option<Value> {
        if self.1 {
            return None;
        }
        if !work(STEP_WORK) {
            self.1 = true;
            return Some(Value::from(stopped()));
        }
        self.0.next()
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl Object for Each {
    fn repr(self: &std::sync::Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }
    fn enumerate(self: &std::sync::Arc<Self>) -> Enumerator {
        match self.0.try_iter() {
            Ok(iter) => Enumerator::Iter(Box::new(EachIter(iter, false))),
            Err(_) => Enumerator::NonEnumerable,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// minijinja keeps these types to itself: only their names say that a value changes. A new name would let a
    /// namespace contain itself.
    #[test]
    fn values_that_change_are_known_by_name() {
        let mut env = Environment::new();
        env.set_debug(false);
        env.add_function("changes", |v: Value| v.as_object().is_some_and(stateful));
        env.add_function("is_tuple", |v: Value| v.as_object().is_some_and(is_tuple));
        env.add_template("m", "{% macro f() %}{% endmacro %}").unwrap();
        for (template, want) in [
            ("{{ changes(namespace()) }}", "true"),
            ("{% for i in [1] %}{{ changes(loop) }}{% endfor %}", "true"),
            ("{% import 'm' as m %}{{ changes(m) }}", "true"),
            ("{{ changes({}) }}{{ changes([]) }}{{ changes((1,)) }}", "falsefalsefalse"),
            ("{{ is_tuple((1,)) }}{{ is_tuple([{'a': 1}]|groupby('a')|first) }}{{ is_tuple([]) }}", "truetruefalse"),
        ] {
            assert_eq!(env.render_str(template, ()).unwrap().to_lowercase(), want, "{template}");
        }
    }
}
