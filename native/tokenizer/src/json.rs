//! JSON as Python's `json` module reads and writes it: objects keep the order of
//! their members, integers are exact up to 128 bits, and `dumps` writes floats as
//! `float.__repr__` does.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};

use crate::bounds::work;
use crate::error::{Error, Result};
use crate::value::{Dict, Key, List};

/// The depth of arrays and objects that is accepted. Values are dropped and rendered
/// recursively, so this also bounds the stack.
const MAX_DEPTH: usize = 128;

/// Parses a document into values that behave in a template as Python's do.
pub fn parse(text: &[u8]) -> Result<Value> {
    let text = std::str::from_utf8(text)
        .map_err(|e| Error::input(format!("the input is not UTF-8 at byte {}", e.valid_up_to())))?;
    let mut p = Parser { text, at: 0, unescaped: Vec::new() };
    let v = p.value(0)?;
    p.space();
    if p.at != text.len() {
        return Err(p.fail("text after the document"));
    }
    Ok(v)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    /// The last string that has escapes; its memory is used again.
    unescaped: Vec<u8>,
}

impl<'a> Parser<'a> {
    fn fail(&self, what: &str) -> Error {
        Error::input(format!("the input is not JSON: {what} at byte {}", self.at))
    }

    fn peek(&self) -> u8 {
        self.text.as_bytes().get(self.at).copied().unwrap_or(0)
    }

    fn space(&mut self) {
        while matches!(self.peek(), b' ' | b'\t' | b'\n' | b'\r') {
            self.at += 1;
        }
    }

    fn word(&mut self, w: &str, v: Value) -> Result<Value> {
        if !self.text[self.at..].starts_with(w) {
            return Err(self.fail("unknown word"));
        }
        self.at += w.len();
        Ok(v)
    }

    fn value(&mut self, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(self.fail("more than 128 levels"));
        }
        self.space();
        match self.peek() {
            b'{' => self.object(depth),
            b'[' => self.array(depth),
            b'"' => Ok(Value::from(self.string()?)),
            b't' => self.word("true", Value::from(true)),
            b'f' => self.word("false", Value::from(false)),
            b'n' => self.word("null", Value::from(())),
            // Python reads these too, and what it reads can reach a template.
            b'N' => self.word("NaN", Value::from(f64::NAN)),
            b'I' => self.word("Infinity", Value::from(f64::INFINITY)),
            b'-' if self.text[self.at..].starts_with("-I") => self.word("-Infinity", Value::from(f64::NEG_INFINITY)),
            b'-' | b'0'..=b'9' => self.number(),
            _ => Err(self.fail("no value")),
        }
    }

    fn object(&mut self, depth: usize) -> Result<Value> {
        let mut dict = Dict::default();
        self.at += 1;
        self.space();
        if self.peek() == b'}' {
            self.at += 1;
            return Ok(Value::from_object(dict));
        }
        loop {
            self.space();
            if self.peek() != b'"' {
                return Err(self.fail("no member name"));
            }
            let key = Key::new(self.string()?);
            self.space();
            if self.peek() != b':' {
                return Err(self.fail("no colon"));
            }
            self.at += 1;
            let v = self.value(depth + 1)?;
            dict.insert_key(key, v);
            self.space();
            match self.peek() {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Ok(Value::from_object(dict));
                }
                _ => return Err(self.fail("no comma or brace")),
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Value> {
        let mut list = Vec::new();
        self.at += 1;
        self.space();
        if self.peek() == b']' {
            self.at += 1;
            return Ok(Value::from_object(List::new(list)));
        }
        loop {
            list.push(self.value(depth + 1)?);
            self.space();
            match self.peek() {
                b',' => self.at += 1,
                b']' => {
                    self.at += 1;
                    return Ok(Value::from_object(List::new(list)));
                }
                _ => return Err(self.fail("no comma or bracket")),
            }
        }
    }

    /// Reads a string. What it returns is valid until the next one is read.
    fn string(&mut self) -> Result<&str> {
        self.at += 1;
        let start = self.at;
        let end = self.skip_unescaped();
        if self.text.as_bytes().get(end) == Some(&b'"') {
            self.at = end + 1;
            return Ok(&self.text[start..end]);
        }
        let mut out = std::mem::take(&mut self.unescaped);
        out.clear();
        out.extend_from_slice(&self.text.as_bytes()[start..end]);
        self.at = end;
        let done = self.unescape(&mut out);
        self.unescaped = out;
        done?;
        std::str::from_utf8(&self.unescaped).map_err(|_| self.fail("a string that is not UTF-8"))
    }

    /// Returns where the first byte at or after the current one is that cannot stand in a
    /// string as it is.
    fn skip_unescaped(&self) -> usize {
        let bytes = self.text.as_bytes();
        let mut at = self.at;
        while let Some(word) = bytes[at..].first_chunk::<8>() {
            match end_in_word(*word) {
                None => at += 8,
                Some(n) => return at + n,
            }
        }
        at + bytes[at..].iter().take_while(|b| !ends_string(**b)).count()
    }

    /// Appends the rest of a string to out. Text with an escape in each line makes the pieces
    /// between escapes short: copying whole words and taking back what is too much costs
    /// less than a copy of the right length.
    fn unescape(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let bytes = self.text.as_bytes();
        loop {
            let mut at = self.at;
            while let Some(word) = bytes[at..].first_chunk::<8>() {
                out.extend_from_slice(word);
                match end_in_word(*word) {
                    None => at += 8,
                    Some(n) => {
                        out.truncate(out.len() - (8 - n));
                        at += n;
                        break;
                    }
                }
            }
            while let Some(b) = bytes.get(at).filter(|b| !ends_string(**b)) {
                out.push(*b);
                at += 1;
            }
            self.at = at;
            match bytes.get(at) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(());
                }
                Some(b'\\') => self.escape(out)?,
                Some(_) => return Err(self.fail("control character in a string")),
                None => return Err(self.fail("unfinished string")),
            }
        }
    }

    fn escape(&mut self, out: &mut Vec<u8>) -> Result<()> {
        self.at += 1;
        let c = self.peek();
        self.at += 1;
        match (ESCAPES[c as usize], c) {
            (0, b'u') => out.extend_from_slice(self.escaped_char()?.encode_utf8(&mut [0; 4]).as_bytes()),
            (0, _) => return Err(self.fail("unknown escape")),
            (plain, _) => out.push(plain),
        }
        Ok(())
    }

    /// Reads what follows `\u`.
    fn escaped_char(&mut self) -> Result<char> {
        let hi = self.hex4()?;
        let code = if (0xd800..0xdc00).contains(&hi) {
            if !self.text.as_bytes()[self.at..].starts_with(b"\\u") {
                return Err(self.fail("half of a surrogate pair"));
            }
            self.at += 2;
            let lo = self.hex4()?;
            if !(0xdc00..0xe000).contains(&lo) {
                return Err(self.fail("half of a surrogate pair"));
            }
            0x10000 + ((hi - 0xd800) << 10) + (lo - 0xdc00)
        } else {
            hi
        };
        // Engines refuse half a pair too: their strings are UTF-8.
        char::from_u32(code).ok_or_else(|| self.fail("half of a surrogate pair"))
    }

    fn hex4(&mut self) -> Result<u32> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4).ok_or_else(|| self.fail("short escape"))?;
        let mut n = 0;
        for d in digits {
            n = n * 16 + (*d as char).to_digit(16).ok_or_else(|| self.fail("bad escape"))?;
        }
        self.at += 4;
        Ok(n)
    }

    fn number(&mut self) -> Result<Value> {
        let bytes = self.text.as_bytes();
        let start = self.at;
        if self.peek() == b'-' {
            self.at += 1;
        }
        match self.peek() {
            b'0' => self.at += 1,
            b'1'..=b'9' => self.digits(),
            _ => return Err(self.fail("bad number")),
        }
        let mut float = false;
        if self.peek() == b'.' && bytes.get(self.at + 1).is_some_and(u8::is_ascii_digit) {
            float = true;
            self.at += 1;
            self.digits();
        }
        if matches!(self.peek(), b'e' | b'E') {
            float = true;
            self.at += 1;
            if matches!(self.peek(), b'+' | b'-') {
                self.at += 1;
            }
            if !self.peek().is_ascii_digit() {
                return Err(self.fail("bad number"));
            }
            self.digits();
        }
        let t = &self.text[start..self.at];
        if float {
            return t.parse::<f64>().map(Value::from).map_err(|_| self.fail("bad number"));
        }
        if let Ok(n) = t.parse::<i64>() {
            return Ok(Value::from(n));
        }
        t.parse::<i128>().map(Value::from).map_err(|_| self.fail("integer of more than 128 bits"))
    }

    fn digits(&mut self) {
        while self.peek().is_ascii_digit() {
            self.at += 1;
        }
    }
}

/// Reports whether a byte cannot stand in a string as it is.
fn ends_string(b: u8) -> bool {
    matches!(b, b'"' | b'\\' | 0..0x20)
}

/// Returns the place of the first byte of a word for which ends_string is true.
fn end_in_word(word: [u8; 8]) -> Option<usize> {
    const EACH: u64 = 0x0101_0101_0101_0101;
    let word = u64::from_le_bytes(word);
    // The high bit of each byte that is below n, and perhaps of bytes behind the first of these.
    let below = |w: u64, n: u64| w.wrapping_sub(n * EACH) & !w & (0x80 * EACH);
    let ends = below(word, 0x20) | below(word ^ (b'"' as u64 * EACH), 1) | below(word ^ (b'\\' as u64 * EACH), 1);
    (ends != 0).then(|| ends.trailing_zeros() as usize / 8)
}

/// What stands for a byte behind a backslash; 0: `\u`, or no escape.
const ESCAPES: [u8; 256] = {
    let mut t = [0; 256];
    (t[b'"' as usize], t[b'\\' as usize], t[b'/' as usize]) = (b'"', b'\\', b'/');
    (t[b'b' as usize], t[b'f' as usize], t[b'n' as usize]) = (0x8, 0xc, b'\n');
    (t[b'r' as usize], t[b't' as usize]) = (b'\r', b'\t');
    t
};

/// The options of `json.dumps` that templates use.
pub struct Dumps {
    pub ensure_ascii: bool,
    pub indent: Option<String>,
    pub item: String,
    pub key: String,
    pub sort_keys: bool,
}

impl Default for Dumps {
    fn default() -> Dumps {
        Dumps { ensure_ascii: false, indent: None, item: ", ".into(), key: ": ".into(), sort_keys: false }
    }
}

/// Writes a value as `json.dumps` does. `limit` bounds the bytes written.
pub fn dumps(v: &Value, o: &Dumps, limit: usize) -> std::result::Result<String, String> {
    let mut w = Writer { out: String::new(), o, limit };
    w.value(v, 0)?;
    w.check()?;
    Ok(w.out)
}

struct Writer<'a> {
    out: String,
    o: &'a Dumps,
    limit: usize,
}

type Written = std::result::Result<(), String>;

impl Writer<'_> {
    fn value(&mut self, v: &Value, depth: usize) -> Written {
        if depth > 2 * MAX_DEPTH {
            return Err("tojson: more than 256 levels".into());
        }
        if !work(2) {
            return Err("tojson: the rendering was stopped".into());
        }
        self.check()?;
        match v.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if v.is_true() { "true" } else { "false" }),
            ValueKind::Number if v.is_integer() => {
                let _ = write!(self.out, "{v}");
            }
            ValueKind::Number => {
                let f = f64::try_from(v.clone()).unwrap_or(f64::NAN);
                self.out.push_str(&match f {
                    f if f.is_nan() => "NaN".to_string(),
                    f if f.is_infinite() => (if f > 0.0 { "Infinity" } else { "-Infinity" }).to_string(),
                    f => float_repr(f),
                });
            }
            ValueKind::String => write_string(&mut self.out, v.as_str().unwrap_or_default(), self.o.ensure_ascii),
            ValueKind::Seq => self.seq(v, depth)?,
            ValueKind::Map => self.map(v, depth)?,
            ValueKind::Undefined => return Err("Object of type Undefined is not JSON serializable".into()),
            k => return Err(format!("Object of type {k} is not JSON serializable")),
        }
        Ok(())
    }

    fn check(&self) -> Written {
        if self.out.len() > self.limit {
            return Err("tojson: the result is too long".into());
        }
        Ok(())
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.o.indent {
            self.out.push('\n');
            for _ in 0..depth {
                if self.out.len() > self.limit {
                    return; // the next check says so
                }
                self.out.push_str(indent);
            }
        }
    }

    fn comma(&mut self) {
        // json.dumps drops the blank after the comma when it indents.
        self.out.push_str(&self.o.item);
    }

    fn seq(&mut self, v: &Value, depth: usize) -> Written {
        self.out.push('[');
        let mut first = true;
        for x in v.try_iter().map_err(|e| e.to_string())? {
            if !first {
                self.comma();
            }
            first = false;
            self.line(depth + 1);
            self.value(&x, depth + 1)?;
        }
        if !first {
            self.line(depth);
        }
        self.out.push(']');
        Ok(())
    }

    fn map(&mut self, v: &Value, depth: usize) -> Written {
        let mut pairs: Vec<(Value, Value)> = Vec::new();
        for k in v.try_iter().map_err(|e| e.to_string())? {
            let x = v.get_item(&k).map_err(|e| e.to_string())?;
            pairs.push((k, x));
        }
        if self.o.sort_keys {
            pairs.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.out.push('{');
        let mut first = true;
        for (k, x) in &pairs {
            if !first {
                self.comma();
            }
            first = false;
            self.line(depth + 1);
            match k.kind() {
                ValueKind::String => write_string(&mut self.out, k.as_str().unwrap_or_default(), self.o.ensure_ascii),
                ValueKind::None => self.out.push_str("\"null\""),
                ValueKind::Bool => self.out.push_str(if k.is_true() { "\"true\"" } else { "\"false\"" }),
                ValueKind::Number if k.is_integer() => {
                    let _ = write!(self.out, "\"{k}\"");
                }
                ValueKind::Number => {
                    let f = f64::try_from(k.clone()).unwrap_or(f64::NAN);
                    let _ = write!(self.out, "\"{}\"", float_repr(f));
                }
                k => return Err(format!("keys must be str, int, float, bool or None, not {k}")),
            }
            self.out.push_str(&self.o.key);
            self.value(x, depth + 1)?;
        }
        if !first {
            self.line(depth);
        }
        self.out.push('}');
        Ok(())
    }
}

fn write_string(out: &mut String, s: &str, ascii: bool) {
    out.push('"');
    let mut from = 0;
    for (i, c) in s.char_indices() {
        let plain = c >= ' ' && c != '"' && c != '\\' && !(ascii && (c as u32) > 0x7e);
        if plain {
            continue;
        }
        out.push_str(&s[from..i]);
        from = i + c.len_utf8();
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{c}' => out.push_str("\\f"),
            '\u{8}' => out.push_str("\\b"),
            c => {
                for u in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{u:04x}");
                }
            }
        }
    }
    out.push_str(&s[from..]);
    out.push('"');
}

/// Writes a finite float as Python's `repr` does: the shortest digits that read back
/// equal, in scientific notation below 1e-4 and from 1e16.
pub fn float_repr(f: f64) -> String {
    if f.is_nan() {
        return "nan".into();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf" } else { "-inf" }.into();
    }
    if f == 0.0 {
        return if f.is_sign_negative() { "-0.0" } else { "0.0" }.into();
    }
    let s = format!("{f:e}"); // shortest digits, as d.ddde[-]n
    let (digits, exp) = s.split_once('e').unwrap_or((&s, "0"));
    let exp: i32 = exp.parse().unwrap_or(0);
    if (-4..16).contains(&exp) {
        let plain = format!("{f}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{digits}e{}{:02}", if exp < 0 { '-' } else { '+' }, exp.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats() {
        for (f, want) in [
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e300, "1.5e+300"),
            (-0.0, "-0.0"),
            (100000.0, "100000.0"),
        ] {
            assert_eq!(float_repr(f), want);
        }
    }

    /// Every byte of ASCII at every place of a string, beside a search byte by byte.
    #[test]
    fn strings() {
        for at in 0..40 {
            for c in 0u8..0x80 {
                let mut text = "é".repeat(20);
                text.insert(at / 2 * 2, c as char);
                let got = parse(format!("[\"{text}\",\"\"]").as_bytes());
                match c {
                    0..0x20 | b'"' | b'\\' => assert!(got.is_err(), "{text:?} was accepted"),
                    _ => assert_eq!(got.unwrap().get_item_by_index(0).unwrap().as_str(), Some(text.as_str())),
                }
            }
            let text = format!("{}\n\u{7f}\"{}", "x".repeat(at), "é".repeat(40 - at));
            let quoted = serde_json::to_string(&text).unwrap();
            assert_eq!(parse(quoted.as_bytes()).unwrap().as_str(), Some(text.as_str()));
        }
    }

    #[test]
    fn dumps_as_python() {
        let v = parse(br#" {"b":[1,2.50,{}],"a":"\u00e9\n\ud83d\ude00","n":123456789012345678901234567890} "#).unwrap();
        let got = dumps(&v, &Dumps::default(), 1 << 20).unwrap();
        assert_eq!(got, "{\"b\": [1, 2.5, {}], \"a\": \"é\\n😀\", \"n\": 123456789012345678901234567890}");
        let v = parse(br#"[NaN, Infinity,-Infinity, "NaN"]"#).unwrap();
        assert_eq!(dumps(&v, &Dumps::default(), 1 << 20).unwrap(), "[NaN, Infinity, -Infinity, \"NaN\"]");
        for bad in ["-NaN", "nan", "Inf", "-Inf", "NaN1", "", "{", "[1,]", "\"\\ud800\"", "01", "[1] 2", "nul", "{\"a\" 1}", "\"\u{1}\""] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad:?} was accepted");
        }
    }
}
