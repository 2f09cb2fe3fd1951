//! Filters and methods of strings, as Python has them, and within the bounds of a rendering.

use std::collections::HashSet;
use std::fmt::{self, Write};

use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error as JinjaError, ErrorKind, State};

use crate::bounds::{self, Jinja, charge, STEP_WORK, check, reserve};
use crate::error::Code;
use crate::value::{List, write_repr, write_str};

/// Adds the filters.
pub fn install(env: &mut Environment<'static>) {
    env.add_filter("string", |state: &State, v: Value| match v.kind() {
        ValueKind::String => Ok(v),
        _ => written(state, &v).map(Value::from),
    });
    env.add_filter("pprint", |state: &State, v: Value| -> Jinja<String> {
        let text = limited(|out| write_repr(out, &v))?;
        charge(state, text.len())?;
        Ok(text)
    });
    env.add_filter("trim", |state: &State, v: Value, chars: Option<Value>| match v.as_str() {
        Some(s) => trim(state, s, chars.as_ref(), true, true),
        None => trim(state, &written(state, &v)?, chars.as_ref(), true, true),
    });
    env.add_filter("indent", indent);
    env.add_filter("format", |state: &mut State, v: Value, args: Rest<ValueOrKwargs>| -> Jinja<Value> {
        let args = args.into_values();
        charge_format(state, v.as_str().unwrap_or_default(), '%', &args)?;
        minijinja::filters::format(state, &v, Rest(args.into_iter().map(Into::into).collect()))
    });
    env.add_filter("replace", |state: &State, args: Rest<ValueOrKwargs>| -> Jinja<Value> {
        let args = args.into_values();
        let (v, old, new, count, kwargs): (Value, Value, Value, Option<i64>, Kwargs) = from_args(&args)?;
        let count = count.or(kwargs.get::<Option<i64>>("count")?);
        kwargs.assert_all_used()?;
        replace(state, &written(state, &v)?, &written(state, &old)?, &written(state, &new)?, count)
    });
    env.add_filter("join", |state: &mut State, v: Value, sep: Option<Value>, attribute: Option<Value>, kwargs: Kwargs| -> Jinja<Value> {
        let sep = sep.or(kwargs.get::<Option<Value>>("d")?);
        let attribute = attribute.or(kwargs.get::<Option<Value>>("attribute")?);
        kwargs.assert_all_used()?;
        let items = match attribute {
            None => v,
            Some(a) => {
                let named: Kwargs = [("attribute", a)].into_iter().collect();
                Value::from(minijinja::filters::map(state, v, Rest(vec![Value::from(named).into()]))?)
            }
        };
        join(state, &written(state, &sep.unwrap_or_default())?, &items)
    });
    env.add_filter("split", |state: &State, v: Value, sep: Option<Value>, most: Option<i64>| split(state, &v, sep, most));
    env.add_filter("lines", |state: &State, v: Value| parts(written(state, &v)?.lines()));
}

/// What Python's `str` gives.
pub fn written(state: &State, v: &Value) -> Jinja<String> {
    let text = limited(|out| write_str(out, v))?;
    charge(state, text.len())?;
    Ok(text)
}

pub fn limited(write: impl FnOnce(&mut dyn Write) -> fmt::Result) -> Jinja<String> {
    let mut text = String::new();
    match write(&mut Limited { out: &mut text, left: output_limit() }) {
        Ok(()) => Ok(text),
        Err(_) => Err(JinjaError::new(ErrorKind::WriteFailure, "cannot write")),
    }
}

/// Writes at most as many bytes as are left.
pub struct Limited<'a, W: Write + ?Sized> {
    pub out: &'a mut W,
    pub left: usize,
}

impl<W: Write + ?Sized> Write for Limited<'_, W> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        let Some(left) = self.left.checked_sub(s.len()) else {
            bounds::fail(Code::Limit);
            return Err(fmt::Error);
        };
        self.left = left;
        self.out.write_str(s)
    }
}

pub fn output_limit() -> usize {
    bounds::call().map_or(1 << 20, |c| c.output)
}

/// Jinja's `indent`. A final line break stays.
fn indent(state: &State, args: Rest<ValueOrKwargs>) -> Jinja<String> {
    let args = args.into_values();
    let (v, width, first, blank, kwargs): (Value, Option<Value>, Option<bool>, Option<bool>, Kwargs) = from_args(&args)?;
    let width = match kwargs.get::<Option<Value>>("width")? {
        None => width,
        given => given,
    };
    let first = kwargs.get::<Option<bool>>("first")?.or(first).unwrap_or(false);
    let blank = kwargs.get::<Option<bool>>("blank")?.or(blank).unwrap_or(false);
    kwargs.assert_all_used()?;
    let by = match width {
        None => "    ".to_string(),
        Some(w) => match (w.as_str(), w.as_i64()) {
            (Some(s), _) => s.to_string(),
            (_, Some(n)) => " ".repeat(n.clamp(0, 1024) as usize),
            _ => return Err(JinjaError::new(ErrorKind::InvalidOperation, "indent: want a number or a string")),
        },
    };
    let text = limited(|out| write_str(out, &v))? + "\n";
    let size = text.len().saturating_add(split_lines(&text).count().saturating_mul(by.len() + 1));
    claim(state, size)?;
    let mut out = String::with_capacity(size);
    for (i, line) in split_lines(&text).enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if if i == 0 { first } else { blank || !line.is_empty() } {
            out.push_str(&by);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `str.splitlines`.
fn split_lines(text: &str) -> impl Iterator<Item = &str> {
    let ends = |c: char| matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let Some(i) = rest.find(ends) else { return Some(std::mem::take(&mut rest)) };
        let (line, end) = rest.split_at(i);
        let n = if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(1, char::len_utf8) };
        rest = &end[n..];
        Some(line)
    })
}

/// A list of texts.
fn parts<'a>(texts: impl Iterator<Item = &'a str>) -> Jinja<Value> {
    let mut items = Vec::new();
    for t in texts {
        check(1)?;
        items.push(Value::from(t));
    }
    Ok(Value::from_object(List::new(items)))
}

/// `str.split`. minijinja makes a list of all parts, each of which is larger than a short separator.
fn split(state: &State, v: &Value, sep: Option<Value>, most: Option<i64>) -> Jinja<Value> {
    let s = written(state, v)?;
    match (sep.as_ref().and_then(|sep| sep.as_str()), most.and_then(|n| usize::try_from(n).ok())) {
        (Some(sep), None) => parts(s.split(sep)),
        (Some(sep), Some(n)) => parts(s.splitn(n.saturating_add(1), sep)),
        (None, None) => parts(s.split_whitespace()),
        (None, Some(_)) => {
            reserve(32 * s.len())?;
            minijinja::filters::split(v, None, most)
        }
    }
}

/// `str.replace`.
fn replace(state: &State, s: &str, old: &str, new: &str, count: Option<i64>) -> Jinja<Value> {
    let count = count.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    charge(state, s.len())?;
    if new.len() > old.len() {
        let more = s.matches(old).take(count).count().saturating_mul(new.len() - old.len());
        claim(state, s.len().saturating_add(more))?;
    }
    Ok(Value::from(s.replacen(old, new, count)))
}

/// `str.join`, of the texts of the items.
fn join(state: &State, sep: &str, items: &Value) -> Jinja<Value> {
    let mut text = String::new();
    let mut out = Limited { out: &mut text, left: output_limit() };
    if items.kind() != ValueKind::Undefined {
        for (i, item) in items.try_iter()?.checked().enumerate() {
            check(STEP_WORK)?;
            let item = item?;
            let left = out.left;
            let sep = if i > 0 { sep } else { "" };
            out.write_str(sep).and_then(|()| write_str(&mut out, &item)).map_err(|_| JinjaError::new(ErrorKind::WriteFailure, "cannot write"))?;
            state.consume_fuel((left - out.left) as u64 / 64)?;
        }
    }
    Ok(Value::from(text))
}

/// Pays for a text of n bytes before it is made.
fn claim(state: &State, n: usize) -> Jinja<()> {
    if n > output_limit() {
        bounds::fail(Code::Limit);
    }
    reserve(n)?;
    charge(state, n)
}

/// `str.isspace`: Unicode white space, and the four separators of ASCII.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip`, `lstrip` and `rstrip`.
fn trim(state: &State, s: &str, chars: Option<&Value>, left: bool, right: bool) -> Jinja<Value> {
    let set = chars.filter(|v| v.kind() == ValueKind::String).and_then(|v| v.as_str());
    // Looking for each character of the text in a long string would take time with the product of their lengths.
    charge(state, set.map_or(0, str::len))?;
    let long: Option<HashSet<char>> = set.filter(|set| set.len() > 16).map(|set| set.chars().collect());
    let drop = |c: char| match (&long, set) {
        (Some(long), _) => long.contains(&c),
        (None, Some(set)) => set.contains(c),
        (None, None) => is_space(c),
    };
    let mut t = s;
    if left {
        t = t.trim_start_matches(drop);
    }
    if right {
        t = t.trim_end_matches(drop);
    }
    charge(state, s.len() - t.len())?;
    Ok(Value::from(t))
}

/// Pays for what a format gives before it is made: minijinja looks at its length only when it has it, or only
/// at the steps. Each field can write all arguments, and fill its width and its precision.
fn charge_format(state: &State, format: &str, mark: char, args: &[Value]) -> Jinja<()> {
    let (mut each, mut numbers) = (0usize, 0usize);
    for a in args {
        each = each.saturating_add(written(state, a)?.len());
        numbers = numbers.saturating_add(a.as_usize().unwrap_or(0));
    }
    let mut sum = format.len();
    for field in format.split(mark).skip(1) {
        let end = match mark {
            '{' => field.find('}'),
            _ => {
                let from = if field.starts_with('(') { field.find(')').map_or(field.len(), |i| i + 1) } else { 0 };
                field[from..].find(|c: char| !matches!(c, '#' | '-' | '+' | ' ' | '.' | '*' | '0'..='9')).map(|i| from + i)
            }
        };
        let spec = &field[..end.unwrap_or(field.len())];
        let widths = spec.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty()).map(|n| n.parse().unwrap_or(usize::MAX));
        let widths = widths.fold(0, usize::saturating_add).saturating_add(if spec.contains('*') { numbers } else { 0 });
        // What fills a width has up to four bytes.
        sum = sum.saturating_add(each).saturating_add(widths.saturating_mul(4));
    }
    claim(state, sum)
}

/// Methods of Python's types that minijinja-contrib lacks or does differently.
pub fn method(state: &mut State, v: &Value, name: &str, args: &[Value]) -> Jinja<Value> {
    if let Some(s) = v.as_str() {
        match (name, args.len()) {
            ("strip", 0 | 1) => return trim(state, s, args.first(), true, true),
            ("lstrip", 0 | 1) => return trim(state, s, args.first(), true, false),
            ("rstrip", 0 | 1) => return trim(state, s, args.first(), false, true),
            ("startswith" | "endswith", _) => charge(state, 0)?, // they look at the beginning or the end only
            _ => charge(state, s.len())?,
        }
        match (name, args.len()) {
            ("format", _) => charge_format(state, s, '{', args)?,
            ("splitlines", 0) => return parts(split_lines(s)),
            ("splitlines", _) => reserve(32 * s.len())?,
            ("split", 0..=2) if args.iter().all(|a| a.as_str().is_some() || a.is_none() || a.is_integer()) => {
                let sep = args.first().filter(|a| !a.is_none()).cloned();
                return split(state, v, sep, args.get(1).and_then(|n| n.as_i64()));
            }
            ("replace", 2 | 3) => {
                if let (Some(old), Some(new)) = (args[0].as_str(), args[1].as_str()) {
                    return replace(state, s, old, new, args.get(2).and_then(|n| n.as_i64()));
                }
            }
            ("join", 1) => return join(state, s, &args[0]),
            ("removeprefix", 1) => return Ok(Value::from(args[0].as_str().and_then(|p| s.strip_prefix(p)).unwrap_or(s))),
            ("removesuffix", 1) => return Ok(Value::from(args[0].as_str().and_then(|p| s.strip_suffix(p)).unwrap_or(s))),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, v, name, args)
}

