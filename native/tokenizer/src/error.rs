//! The errors of the library, with the codes of `sluice_tokenizer.h`.

use std::fmt;

/// The outcome of a call. The numbers are part of the ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    Ok = 0,
    Argument = 1,
    NotFound = 2,
    Unsupported = 3,
    Input = 4,
    Template = 5,
    Limit = 6,
    Deadline = 7,
    Panic = 8,
    Thread = 9,
    Refused = 10,
}

/// An error and what it is about. The texts of `Template` and `Refused` can quote the request.
#[derive(Debug)]
pub struct Error {
    pub code: Code,
    pub text: String,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(code: Code, text: impl Into<String>) -> Error {
        Error { code, text: text.into() }
    }
    pub fn input(text: impl Into<String>) -> Error {
        Error::new(Code::Input, text)
    }
    pub fn template(text: impl Into<String>) -> Error {
        Error::new(Code::Template, text)
    }
    pub fn refused(text: impl Into<String>) -> Error {
        Error::new(Code::Refused, text)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
