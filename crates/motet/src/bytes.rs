//! Sizes in bytes, as people write and read them.

/// The units, greatest first.
const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

/// Reads `4GiB`, `512MiB`, `1.5GB` (10⁹), `123456`.
///
/// # Errors
/// A sentence that says what is expected.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    let wrong = || {
        format!("'{text}' is not a size; expected a number of bytes or one with KiB, MiB, GiB, KB, MB, GB")
    };
    let trimmed = text.trim();
    let at = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(at);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024.0 * 1024.0,
        "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let bytes = number * factor;
    if bytes.is_finite() && bytes < 9e18 { Ok(bytes as u64) } else { Err(wrong()) }
}

/// `93.8 MiB`
pub(crate) fn show(bytes: u64) -> String {
    match UNITS.iter().find(|(_, size)| bytes >= *size) {
        Some((unit, size)) => format!("{:.1} {unit}", bytes as f64 / *size as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in
            [("4GiB", 4 << 30), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("2k", 2048), ("77", 77)]
        {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "4 apples", "-1", "1e30GiB"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_their_unit() {
        assert_eq!(show(5), "5 B");
        assert_eq!(show(1536), "1.5 KiB");
        assert_eq!(show(98_362_432), "93.8 MiB");
    }
}
