//! Numbers as Python prints them, which is what reaches the prompt.

use super::EncodeError;

/// Digits that survive any JSON reader; with more, readers may disagree in the last one.
const SAFE_DIGITS: usize = 15;
/// Powers of ten that a double holds exactly.
const SAFE_EXPONENT: i32 = 22;

/// A finite double as Python's `repr`: the shortest digits, in scientific notation from 1e16 and below 1e-4.
pub(super) fn repr(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = split(&scientific);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

/// Refuses doubles that the engine may have read as something else: with many digits, or an integer too long for us.
pub(super) fn certain(value: f64) -> Result<f64, EncodeError> {
    let scientific = format!("{value:e}");
    let (digits, exponent) = split(&scientific);
    let count = digits.bytes().filter(u8::is_ascii_digit).count();
    let too_long_an_integer = exponent > 18;
    if count > SAFE_DIGITS || exponent.abs() > SAFE_EXPONENT || too_long_an_integer {
        return Err(EncodeError::uncertain(format!("the number {scientific}")));
    }
    Ok(value)
}

fn split(scientific: &str) -> (&str, i32) {
    let (digits, exponent) = scientific.split_once('e').unwrap_or((scientific, "0"));
    (digits, exponent.parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubles_print_as_in_python() {
        for (value, text) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e17, "1.5e+17"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (1e100, "1e+100"),
        ] {
            assert_eq!(repr(value), text);
        }
    }

    #[test]
    fn a_number_that_readers_may_disagree_on_is_uncertain() {
        assert!(certain(0.123_456_789_012_345).is_ok());
        assert!(certain(0.123_456_789_012_345_67).is_err());
        assert!(certain(1e19).is_err());
        assert!(certain(1e-30).is_err());
    }
}
