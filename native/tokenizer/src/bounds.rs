//! What keeps a template within its bounds, wherever it is from: one can come from an engine.
//!
//! minijinja counts steps (fuel), but an operation on a value whose size doubles at each step, or on one
//! that is nested without end, is one step of any duration, and too deep a value or expression overflows
//! the stack, which ends the process. So
//!
//! - `rewrite` refuses templates with expressions that nest or chain too much, and passes every value that
//!   outlives its expression through `BOUND` or `ATTRIBUTE`;
//! - `Bounder` makes of such a value one of `value.rs`, which knows its depth and its size, and refuses what
//!   is too deep, too large or could contain itself;
//! - those values, loops, methods and writes call `work`, which looks at the clock.

use std::cell::Cell;
use std::time::Instant;

use minijinja::machinery::{Span, Token, Tokenizer};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{DynObject, Enumerator, Object, ObjectRepr, Tuple, Value, ValueIter, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, State};

use crate::error::{Code, Error, Result};
use crate::value::{Dict, Key, List, Pairs, Size};

type Jinja<T> = std::result::Result<T, JinjaError>;

/// Operators, calls, subscripts and filters of one tag. Each can nest the syntax tree by one level, which
/// the compiler walks recursively. Templates of real models have up to 60.
const MAX_OPERATORS: usize = 500;

/// Slices of one tag. minijinja makes none before it is read, so that a slice of slices takes time with the cube
/// of their number. Real templates have up to 3.
const MAX_SLICES: usize = 16;

/// Brackets within brackets.
const MAX_BRACKETS: usize = 32;

/// `elif` of all the `if` around one place: each is nested in the one before. Real ones have up to 10.
const MAX_ELIFS: usize = 200;

/// The depth of a value that outlives its expression. It is above that of a request's JSON.
const MAX_DEPTH: usize = 256;

/// What such a value weighs, see `Size`, in a request without bytes.
const MAX_WEIGHT: usize = 1 << 20;

/// The bytes of such a string, in a request without bytes.
const MAX_TEXT: usize = 16 << 20;

/// The filters that `rewrite` adds.
const BOUND: &str = "__bound";
const ATTRIBUTE: &str = "__attribute";
const EACH: &str = "__each";
const STEP: &str = "__step";
const FACTOR: &str = "__factor";

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

/// Reports whether the call may go on.
pub fn running() -> bool {
    FAILED.get().is_none()
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

pub fn begin(call: Call) {
    CALL.set(Some(call));
    FAILED.set(None);
    WORK.set(0);
    BYTES.set(0);
}

/// Ends the call and returns why it was stopped.
pub fn end() -> Option<Code> {
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
    env.add_filter(FACTOR, factor);
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
            let max = call().map_or(MAX_WEIGHT, |c| MAX_WEIGHT + c.size);
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
                let is_tuple = o.is::<Tuple>();
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

/// An operand of `*`. minijinja repeats a list without making one, so that no bound but that of 100 million
/// items holds for what reads it.
fn factor(v: Value) -> Jinja<Value> {
    match v.kind() {
        ValueKind::Seq | ValueKind::Iterable => Err(forbidden("lists cannot be multiplied")),
        _ => Ok(v),
    }
}

/// What a loop iterates over, with a look at the clock.
fn each(v: Value) -> Jinja<Value> {
    check(STEP_WORK)?;
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

/// Refuses a template that nests or chains too much, and adds the filters above to the others.
pub fn rewrite(source: &str, name: &str, syntax: &SyntaxConfig) -> Result<String> {
    let mut r = Rewriter { source, out: String::with_capacity(source.len() + source.len() / 8), copied: 0, elifs: Vec::new(), elif_sum: 0 };
    let mut tokens = Tokenizer::new(source, name, false, syntax.clone());
    let mut tag: Vec<(Token, Span)> = Vec::new();
    loop {
        match tokens.next_token().map_err(|e| Error::template(crate::render::describe(&e)))? {
            None => break,
            Some((Token::TemplateData(_), _)) => {}
            Some((Token::VariableStart | Token::BlockStart, _)) => tag.clear(),
            Some((Token::VariableEnd, _)) => r.tag(&tag, false)?,
            Some((Token::BlockEnd, _)) => r.tag(&tag, true)?,
            Some(t) => tag.push(t),
        }
    }
    r.out.push_str(&source[r.copied..]);
    Ok(r.out)
}

struct Rewriter<'a> {
    source: &'a str,
    out: String,
    /// The bytes of source that are in out.
    copied: usize,
    /// The number of `elif` of each open `if`.
    elifs: Vec<usize>,
    elif_sum: usize,
}

/// An open bracket of a tag.
struct Bracket {
    at: usize,
    is_literal: bool,
    is_call: bool,
    /// Where the current argument begins.
    arg: usize,
    commas: usize,
    colons: usize,
    /// Something that is not constant is inside.
    computed: bool,
}

impl Rewriter<'_> {
    fn tag(&mut self, t: &[(Token, Span)], is_block: bool) -> Result<()> {
        let word = |i: usize| match t.get(i) {
            Some((Token::Ident(w), _)) => *w,
            _ => "",
        };
        let first = if is_block { word(0) } else { "" };
        self.count_elifs(first)?;
        let (mut before, mut after) = (vec![0usize; t.len()], vec![Vec::<&str>::new(); t.len()]);
        macro_rules! wrap {
            ($from:expr, $to:expr, $filter:expr) => {{
                let (from, to): (usize, usize) = ($from, $to);
                if from < to {
                    before[from] += 1;
                    after[to - 1].push($filter);
                }
            }};
        }
        let mut open: Vec<Bracket> = Vec::new();
        let (mut operators, mut slices) = (0, 0);
        // Where the expression of a set, a for or a with begins, and whether the target is an attribute.
        let (mut value, mut dotted, mut piped) = (None, false, false);
        for i in 0..t.len() {
            let token = &t[i].0;
            let in_target = matches!(first, "set" | "for") && value.is_none();
            match token {
                Token::Ident("and" | "or" | "not" | "is" | "in" | "if" | "else") => operators += 1,
                Token::Plus | Token::Minus | Token::Mul | Token::Div | Token::FloorDiv | Token::Pow | Token::Mod | Token::Dot | Token::Tilde | Token::Pipe
                | Token::Eq | Token::Ne | Token::Gt | Token::Gte | Token::Lt | Token::Lte | Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => operators += 1,
                _ => {}
            }
            if operators > MAX_OPERATORS {
                return Err(Error::template(format!("a tag has more than {MAX_OPERATORS} operators")));
            }
            match token {
                Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) | Token::Comma | Token::Colon | Token::Minus
                | Token::BracketOpen | Token::BracketClose | Token::ParenClose | Token::BraceOpen | Token::BraceClose => {}
                Token::ParenOpen if !ends_operand(t, i) => {}
                _ => {
                    if let Some(b) = open.last_mut() {
                        b.computed = true;
                    }
                }
            }
            match token {
                Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => {
                    let operand = ends_operand(t, i) || is_test_argument(t, i);
                    let is_call = operand && matches!(token, Token::ParenOpen);
                    open.push(Bracket { at: i, is_literal: !operand && !in_target, is_call, arg: i + 1, commas: 0, colons: 0, computed: false });
                    if open.len() > MAX_BRACKETS {
                        return Err(Error::template(format!("an expression has more than {MAX_BRACKETS} brackets in each other")));
                    }
                }
                Token::BracketClose | Token::ParenClose | Token::BraceClose => {
                    let Some(b) = open.pop() else { continue }; // the parser will complain
                    let assigned = matches!(t.get(i + 1), Some((Token::Assign, _)));
                    let is_value = !matches!(token, Token::ParenClose) || b.commas > 0;
                    if b.is_literal && b.computed && is_value && !assigned {
                        wrap!(b.at, i + 1, BOUND);
                    }
                    if b.is_call {
                        let (from, filter) = argument(t, b.arg, i);
                        wrap!(from, i * usize::from(filter), BOUND);
                    }
                    if b.colons > 0 && !b.is_literal {
                        slices += 1;
                        if slices > MAX_SLICES {
                            return Err(Error::template(format!("a tag has more than {MAX_SLICES} slices")));
                        }
                    }
                    if b.colons == 2 && !b.is_literal && b.arg < i {
                        wrap!(b.arg, i, STEP);
                    }
                    if let Some(outer) = open.last_mut() {
                        outer.computed |= b.computed;
                    }
                }
                Token::Comma => match open.last_mut() {
                    Some(b) => {
                        b.commas += 1;
                        if b.is_call {
                            let (from, filter) = argument(t, b.arg, i);
                            wrap!(from, i * usize::from(filter), BOUND);
                        }
                        b.arg = i + 1;
                    }
                    None if first == "with" => {
                        if let Some(from) = value.take() {
                            wrap!(from, i, BOUND);
                        }
                    }
                    None => {}
                },
                Token::Colon => {
                    if let Some(b) = open.last_mut() {
                        b.colons += 1;
                        b.arg = i + 1;
                    }
                }
                Token::Mul if i > 0 && !in_target && !matches!(t[i - 1].0, Token::ParenOpen | Token::Comma) => {
                    after[i - 1].push(FACTOR);
                    let end = operand_end(t, i + 1);
                    if end > i + 1 {
                        after[end - 1].push(FACTOR);
                    }
                }
                Token::Dot if in_target => dotted = true,
                Token::Pipe if in_target && open.is_empty() => piped = true,
                Token::Assign if open.is_empty() && value.is_none() && !piped && matches!(first, "set" | "with") => value = Some(i + 1),
                Token::Ident("in") if open.is_empty() && value.is_none() && first == "for" => value = Some(i + 1),
                Token::Ident("if" | "recursive") if open.is_empty() && first == "for" => {
                    if let Some(from) = value.filter(|from| *from < i) {
                        wrap!(from, i, EACH);
                        value = Some(t.len()); // the rest is the condition
                    }
                }
                _ => {}
            }
        }
        match (first, value) {
            ("set", Some(from)) if constant(&t[from..], dotted) => {}
            ("set", Some(from)) => wrap!(from, t.len(), if dotted { ATTRIBUTE } else { BOUND }),
            ("with", Some(from)) => wrap!(from, t.len(), BOUND),
            ("for", Some(from)) => wrap!(from, t.len(), EACH),
            // The filters of a block can make another value of its text.
            ("set", None) if piped => after[t.len() - 1].push(""),
            _ => {}
        }
        for i in 0..t.len() {
            if before[i] == 0 && after[i].is_empty() {
                continue;
            }
            let (from, to) = (t[i].1.start_offset as usize, t[i].1.end_offset as usize);
            self.out.push_str(&self.source[self.copied..from]);
            self.out.extend(std::iter::repeat_n("((", before[i])); // a filter binds more tightly than an operator
            self.out.push_str(&self.source[from..to]);
            for filter in &after[i] {
                match *filter {
                    FACTOR => self.out.extend(["|", FACTOR]),
                    "" => self.out.extend(["|", ATTRIBUTE]),
                    f => self.out.extend([")|", f, ")"]),
                }
            }
            self.copied = to;
        }
        Ok(())
    }

    fn count_elifs(&mut self, word: &str) -> Result<()> {
        match word {
            "if" => self.elifs.push(0),
            "elif" => {
                if let Some(n) = self.elifs.last_mut() {
                    *n += 1;
                    self.elif_sum += 1;
                }
                if self.elif_sum > MAX_ELIFS {
                    return Err(Error::template(format!("more than {MAX_ELIFS} elif follow each other or are nested")));
                }
            }
            "endif" => self.elif_sum -= self.elifs.pop().unwrap_or(0),
            _ => {}
        }
        Ok(())
    }
}

/// Reports whether the token before i ends an operand, so that a bracket at i is a subscript or a call.
fn ends_operand(t: &[(Token, Span)], i: usize) -> bool {
    let Some((before, _)) = i.checked_sub(1).map(|j| &t[j]) else { return false };
    match before {
        Token::Ident("and" | "or" | "not" | "is" | "in" | "if" | "elif" | "else") => i >= 2 && matches!(t[i - 2].0, Token::Dot | Token::Pipe),
        Token::Ident(_) | Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) | Token::BracketClose | Token::ParenClose | Token::BraceClose => true,
        _ => false,
    }
}

/// Reports whether a bracket at i begins the arguments of the test `is in`.
fn is_test_argument(t: &[(Token, Span)], i: usize) -> bool {
    let is = |back: usize, w: &str| i >= back && matches!(&t[i - back].0, Token::Ident(x) if *x == w);
    is(1, "in") && (is(2, "is") || is(2, "not") && is(3, "is"))
}

/// Where the operand that begins at i ends, with its attributes, subscripts, calls and filters.
fn operand_end(t: &[(Token, Span)], mut i: usize) -> usize {
    while matches!(t.get(i), Some((Token::Minus, _))) {
        i += 1;
    }
    let mut depth = 0usize;
    let mut first = true;
    while let Some((token, _)) = t.get(i) {
        match token {
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => depth += 1,
            Token::BracketClose | Token::ParenClose | Token::BraceClose if depth == 0 => break,
            Token::BracketClose | Token::ParenClose | Token::BraceClose => depth -= 1,
            _ if depth > 0 || first => {}
            Token::Dot | Token::Pipe => i += 1, // and the name
            Token::Str(_) | Token::String(_) => {} // strings in a row are one
            _ => break,
        }
        first = false;
        i += 1;
    }
    i.min(t.len())
}

/// Where the value of an argument begins, and whether it can be another value than a variable, an item
/// of one, a constant, or what another filter has bounded.
fn argument(t: &[(Token, Span)], from: usize, to: usize) -> (usize, bool) {
    let mut from = from;
    match t[from..to] {
        [(Token::Ident(_), _), (Token::Assign, _), ..] => from += 2,
        [(Token::Mul | Token::Pow, _), ..] => from += 1,
        _ => {}
    }
    let computed = t[from..to].iter().any(|(t, _)| matches!(t, Token::Plus | Token::Mul | Token::Pipe | Token::Colon));
    (from, computed)
}

/// Reports whether what is assigned needs no bound: it is a constant, or to a variable also an item of another one.
fn constant(t: &[(Token, Span)], attribute: bool) -> bool {
    t.iter().all(|(t, _)| match t {
        Token::Ident("true" | "false" | "none" | "True" | "False" | "None" | "not") => true,
        Token::Ident(_) | Token::Dot | Token::BracketOpen | Token::BracketClose => !attribute,
        Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Float(_) | Token::Minus => true,
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(source: &str) -> String {
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        rewrite(source, "t", &syntax.build().unwrap()).unwrap()
    }

    #[test]
    fn what_outlives_its_expression_is_bounded() {
        for (source, want) in [
            ("a {{ b.c|d }} {# {{ #}{% if a == 'x' %}y{% endif %}", "a {{ b.c|d }} {# {{ #}{% if a == 'x' %}y{% endif %}"),
            ("{% set x = a + b -%}", "{% set x = ((a + b)|__bound) -%}"),
            ("{% set x = a.b[0] %}{% set n.x = true %}{% set n.x = a %}", "{% set x = a.b[0] %}{% set n.x = true %}{% set n.x = ((a)|__attribute) %}"),
            ("{%- set n.x = a, b %}", "{%- set n.x = ((a, b)|__attribute) %}"),
            ("{% set x | f(a=1) %}{% endset %}", "{% set x | f(a=1)|__attribute %}{% endset %}"),
            ("{% for k, (a, b) in x.items() if a in [b] %}", "{% for k, (a, b) in ((x.items())|__each) if a in (([b])|__bound) %}"),
            ("{% for a in recursive recursive %}", "{% for a in ((recursive)|__each) recursive %}"),
            ("{% with (a, b) = c, d = e %}", "{% with (a, b) = ((c)|__bound), d = ((e)|__bound) %}"),
            ("{{ f(a, b[1:], k=c + d, *e) }}", "{{ f(a, ((b[1:])|__bound), k=((c + d)|__bound), *e) }}"),
            ("{{ a[::-1] ~ [1, 'b'] ~ [a][0] }}", "{{ a[::((-1)|__step)] ~ [1, 'b'] ~ (([a])|__bound)[0] }}"),
            ("{{ -a.b[0] * c.d('e')|f + 1 }}", "{{ -a.b[0]|__factor * c.d('e')|f|__factor + 1 }}"),
            ("{{ {'a': b} is in ([1], c) }}", "{{ (({'a': b})|__bound) is in ([1], c) }}"),
            ("{% macro f(a, b=[a]) %}", "{% macro f(a, b=(([a])|__bound)) %}"),
            ("{{ (a, b) and (a or b) }}", "{{ (((a, b))|__bound) and (a or b) }}"),
        ] {
            assert_eq!(rewritten(source), want);
        }
    }
}
