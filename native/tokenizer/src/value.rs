//! Values of a template that behave as Python's: dictionaries with the order of the
//! JSON document and methods that can be asked for without a call, and the text that
//! `str` gives of a value.

use std::borrow::Borrow;
use std::fmt::{self, Write};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use indexmap::IndexMap;
use minijinja::value::{DynObject, Enumerator, Object, ObjectExt, ObjectRepr, Tuple, Value, ValueKind};

use crate::bounds::{read, work};
use crate::json::float_repr;

/// How large a value is, counted as a tree: what it shares counts each time, as it does for what
/// writes or compares it.
#[derive(Debug, Default, Clone, Copy)]
pub struct Size {
    pub depth: usize,
    /// The number of items, and of 32 bytes of strings.
    pub weight: usize,
}

impl Size {
    pub fn of(v: &Value) -> Size {
        if let Some(s) = v.as_str() {
            return Size { depth: 0, weight: 1 + s.len() / 32 };
        }
        let Some(o) = v.as_object() else { return Size { depth: 0, weight: 1 } };
        if let Some(l) = o.downcast_ref::<List>() {
            return l.1;
        }
        if let Some(d) = o.downcast_ref::<Dict>() {
            return d.1;
        }
        if let Some(p) = o.downcast_ref::<Pairs>() {
            return p.1;
        }
        let mut size = Size { depth: 0, weight: 1 };
        if let Some(t) = o.downcast_ref::<Tuple>() {
            t.iter().for_each(|v| size.add(v));
        }
        size
    }
    fn add(&mut self, v: &Value) {
        let of = Size::of(v);
        self.depth = self.depth.max(of.depth + 1);
        self.weight = self.weight.saturating_add(of.weight);
    }
}

/// A key, kept as the value that iteration gives.
#[derive(Debug, Clone)]
pub struct Key(Value);

impl Key {
    pub fn new(text: &str) -> Key {
        Key(Value::from(text))
    }
    fn text(&self) -> &str {
        self.0.as_str().unwrap_or_default()
    }
}
impl Hash for Key {
    fn hash<H: Hasher>(&self, h: &mut H) {
        self.text().hash(h)
    }
}
impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.text() == other.text()
    }
}
impl Eq for Key {}
impl Borrow<str> for Key {
    fn borrow(&self) -> &str {
        self.text()
    }
}

/// A JSON object.
#[derive(Debug, Default)]
pub struct Dict(IndexMap<Key, Value>, Size);

impl Dict {
    /// Sets a member. A name that repeats keeps its first place and its last value,
    /// as in Python.
    pub fn insert(&mut self, key: &str, v: Value) {
        self.insert_key(Key::new(key), v);
    }
    pub fn insert_key(&mut self, key: Key, v: Value) {
        self.1.add(&key.0);
        self.1.add(&v);
        self.0.insert(key, v);
    }
    /// A copy with one member set.
    pub fn with(&self, key: &str, v: Value) -> Dict {
        let mut d = Dict(self.0.clone(), self.1);
        d.insert(key, v);
        d
    }
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(k, v)| (k.text(), v))
    }
}

/// The methods of `dict`. As in Jinja, `x.items` is always the method, and `x['items']`
/// is the method if there is no such key, which is true: the template of gpt-oss relies
/// on it.
pub const DICT_METHODS: [&str; 6] = ["copy", "fromkeys", "get", "items", "keys", "values"];

/// Precedes a name of DICT_METHODS in a subscript: the engine asks for a key in the same
/// way for `x['items']` and `'items' in x`, so subscripts are marked when a template is
/// compiled.
pub const SUBSCRIPT: char = '\u{1}';

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        match key.strip_prefix(SUBSCRIPT) {
            None => self.0.get(key).and_then(read),
            Some(key) => Some(self.0.get(key).and_then(read).unwrap_or_else(|| Value::from_object(BoundMethod))),
        }
    }
    /// Looks up an attribute.
    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        if DICT_METHODS.contains(&key) {
            return Some(Value::from_object(BoundMethod));
        }
        self.0.get(key).and_then(read)
    }
    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_rev_enumerator(|d| Box::new(d.0.keys().map(|k| k.0.clone())))
    }
    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_pairs(f, self.0.iter().map(|(k, v)| (&k.0, v)))
    }
}

fn write_pairs<'a>(f: &mut dyn fmt::Write, pairs: impl Iterator<Item = (&'a Value, &'a Value)>) -> fmt::Result {
    f.write_char('{')?;
    for (i, (k, v)) in pairs.enumerate() {
        if i > 0 {
            f.write_str(", ")?;
        }
        write_repr(f, k)?;
        f.write_str(": ")?;
        write_repr(f, v)?;
    }
    f.write_char('}')
}

/// A dictionary of a template, with keys of any kind.
#[derive(Debug)]
pub struct Pairs(IndexMap<Value, Value>, Size);

impl Pairs {
    pub fn new(pairs: Vec<(Value, Value)>) -> Pairs {
        let mut size = Size { depth: 0, weight: 1 };
        for (k, v) in &pairs {
            size.add(k);
            size.add(v);
        }
        Pairs(pairs.into_iter().collect(), size)
    }
}

impl Object for Pairs {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key).and_then(read)
    }
    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_rev_enumerator(|p| Box::new(p.0.keys().cloned()))
    }
    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_pairs(f, self.0.iter())
    }
}

/// A JSON array, or a list that a template keeps.
#[derive(Debug)]
pub struct List(Vec<Value>, Size);

impl List {
    pub fn new(items: Vec<Value>) -> List {
        let mut size = Size { depth: 0, weight: 1 };
        items.iter().for_each(|v| size.add(v));
        List(items, size)
    }
    pub fn items(&self) -> &[Value] {
        &self.0
    }
}

/// The items of a list, up to the end of the call: what walks over millions of them ends with it.
struct Items<'a>(std::slice::Iter<'a, Value>);

impl Iterator for Items<'_> {
    type Item = Value;
    fn next(&mut self) -> Option<Value> {
        self.0.next().and_then(read)
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.size_hint()
    }
}

impl DoubleEndedIterator for Items<'_> {
    fn next_back(&mut self) -> Option<Value> {
        self.0.next_back().and_then(read)
    }
}

impl Object for List {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).and_then(read)
    }
    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_rev_enumerator(|l| Box::new(Items(l.0.iter())))
    }
    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }
    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('[')?;
        for (i, v) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            write_repr(f, v)?;
        }
        f.write_char(']')
    }
}

/// A method that was asked for but not called.
#[derive(Debug)]
struct BoundMethod;

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }
}

/// Writes what Python's `str` gives of a value.
pub fn write_str(f: &mut dyn fmt::Write, v: &Value) -> fmt::Result {
    match v.kind() {
        ValueKind::String => f.write_str(v.as_str().unwrap_or_default()),
        ValueKind::Undefined => Ok(()),
        _ => write_repr(f, v),
    }
}

/// Reports whether a list is a tuple in Python. What groupby gives is of a type that minijinja keeps to itself.
pub fn is_tuple(o: &DynObject) -> bool {
    o.is::<Tuple>() || o.type_name().ends_with("GroupTuple")
}

/// Writes what Python's `repr` gives of a value.
pub fn write_repr(f: &mut dyn fmt::Write, v: &Value) -> fmt::Result {
    if !work(2) {
        return Ok(()); // the call fails in any case, and to_string panics at an error
    }
    match v.kind() {
        ValueKind::None => f.write_str("None"),
        ValueKind::Bool => f.write_str(if v.is_true() { "True" } else { "False" }),
        ValueKind::Number if v.is_integer() => write!(f, "{v}"),
        ValueKind::Number => f.write_str(&float_repr(f64::try_from(v.clone()).unwrap_or(f64::NAN))),
        ValueKind::String => quote(f, v.as_str().unwrap_or_default()),
        ValueKind::Undefined => f.write_str("Undefined"),
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = match v.as_object().is_some_and(is_tuple) {
                true if v.len() == Some(1) => ("(", ",)"),
                true => ("(", ")"),
                false => ("[", "]"),
            };
            f.write_str(open)?;
            for (i, x) in v.try_iter().map_err(|_| fmt::Error)?.enumerate() {
                if i > 0 {
                    f.write_str(", ")?;
                }
                write_repr(f, &x)?;
            }
            f.write_str(close)
        }
        ValueKind::Map => {
            f.write_char('{')?;
            for (i, k) in v.try_iter().map_err(|_| fmt::Error)?.enumerate() {
                if i > 0 {
                    f.write_str(", ")?;
                }
                write_repr(f, &k)?;
                f.write_str(": ")?;
                write_repr(f, &v.get_item(&k).map_err(|_| fmt::Error)?)?;
            }
            f.write_char('}')
        }
        _ => write!(f, "{v}"),
    }
}

/// Writes a string as `str.__repr__` does.
fn quote(f: &mut dyn fmt::Write, s: &str) -> fmt::Result {
    let q = if s.contains('\'') && !s.contains('"') { '"' } else { '\'' };
    f.write_char(q)?;
    for c in s.chars() {
        match c {
            '\\' => f.write_str("\\\\")?,
            '\n' => f.write_str("\\n")?,
            '\r' => f.write_str("\\r")?,
            '\t' => f.write_str("\\t")?,
            c if c == q => write!(f, "\\{c}")?,
            c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) || c == '\u{ad}' => write!(f, "\\x{:02x}", c as u32)?,
            c if !printable(c) => match c as u32 {
                n if n <= 0xffff => write!(f, "\\u{n:04x}")?,
                n => write!(f, "\\U{n:08x}")?,
            },
            c => f.write_char(c)?,
        }
    }
    f.write_char(q)
}

/// Approximates `str.isprintable` above U+00A0: separators, format characters,
/// surrogates and private use are not printable. Unassigned code points count as
/// assigned.
fn printable(c: char) -> bool {
    !matches!(c as u32,
        0x600..=0x605 | 0x61c | 0x6dd | 0x70f | 0x1680 | 0x180e | 0x2000..=0x200f | 0x2028..=0x202f
        | 0x205f..=0x206f | 0x3000 | 0xe000..=0xf8ff | 0xfeff | 0xfff9..=0xfffb | 0xe0000..=0xe0fff | 0xf0000..=0x10ffff)
}
