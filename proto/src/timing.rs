//! Where the time of an attempt went, as it is stored: one short text, so that it needs one column.

use std::{fmt, net::SocketAddr, str::FromStr, time::Duration};

/// A phase that was not reached, or not needed, has no duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timing {
    /// The address that was connected to, or that was tried first.
    pub address: Option<SocketAddr>,
    pub dns: Option<Duration>,
    pub connect: Option<Duration>,
    pub tls: Option<Duration>,
    /// From the request to the head of the response.
    pub first_byte: Option<Duration>,
}

impl Timing {
    fn phases(&self) -> [Option<Duration>; 4] {
        [self.dns, self.connect, self.tls, self.first_byte]
    }
}

/// `203.0.113.7:443 12 30 45 -`: the address, and the milliseconds of each phase.
impl fmt::Display for Timing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(address) => address.fmt(f)?,
            None => f.write_str("-")?,
        }
        for phase in self.phases() {
            match phase {
                Some(time) => write!(f, " {}", time.as_millis())?,
                None => f.write_str(" -")?,
            }
        }
        Ok(())
    }
}

/// The text is not a timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a timing")]
pub struct NotATiming;

impl FromStr for Timing {
    type Err = NotATiming;

    fn from_str(text: &str) -> Result<Self, NotATiming> {
        fn read<T: FromStr>(word: Option<&str>) -> Result<Option<T>, NotATiming> {
            match word.ok_or(NotATiming)? {
                "-" => Ok(None),
                word => word.parse().map(Some).map_err(|_| NotATiming),
            }
        }
        let mut words = text.split(' ');
        let address = read(words.next())?;
        let mut phase = || Ok(read(words.next())?.map(Duration::from_millis));
        let timing = Self {
            address,
            dns: phase()?,
            connect: phase()?,
            tls: phase()?,
            first_byte: phase()?,
        };
        match words.next() {
            None => Ok(timing),
            Some(_) => Err(NotATiming),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timing_reads_back() {
        let ms = |ms| Some(Duration::from_millis(ms));
        let timing = Timing {
            address: "[2001:db8::1]:443".parse().ok(),
            dns: ms(12),
            connect: ms(0),
            tls: None,
            first_byte: None,
        };
        assert_eq!(timing.to_string(), "[2001:db8::1]:443 12 0 - -");
        assert_eq!(timing.to_string().parse(), Ok(timing));
        assert_eq!(Timing::default().to_string().parse(), Ok(Timing::default()));
        for text in ["", "-", "- 1 2 3", "- 1 2 3 x", "- 1 2 3 4 5", "here 1 2 3 4"] {
            assert_eq!(text.parse::<Timing>(), Err(NotATiming), "{text}");
        }
    }
}
