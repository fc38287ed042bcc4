//! `client-output-buffer-limit`: the client output buffer size at which a client is disconnected.
//!
//! The hard limit applies immediately, the soft limit when it is exceeded continuously for the given seconds. 0 means
//! no limit. The `slave` class is stored and shown but has no clients: replicas follow the journal.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::settings::bytes;

/// The client classes in the order of CONFIG GET.
const CLASSES: [&str; 3] = ["normal", "slave", "pubsub"];

/// The client class that selects the limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// A client in request/reply mode.
    Normal = 0,
    /// A client with at least one subscription.
    PubSub = 2,
}

/// The output buffer limits of one class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Limit {
    /// Hard limit in bytes.
    pub hard: u64,
    /// Soft limit in bytes.
    pub soft: u64,
    /// Seconds for which the soft limit may be exceeded.
    pub soft_seconds: u64,
}

/// The limits of all classes, readable without a lock.
#[derive(Default)]
pub struct OutputLimits {
    numbers: [[AtomicU64; 3]; 3],
}

impl OutputLimits {
    /// The limits of a class.
    pub fn get(&self, class: Class) -> Limit {
        let [hard, soft, soft_seconds] =
            self.numbers[class as usize].each_ref().map(|number| number.load(Ordering::Relaxed));
        Limit { hard, soft, soft_seconds }
    }

    pub(crate) fn set(&self, text: &str) {
        for (numbers, limit) in self.numbers.iter().zip(Self::read(text).unwrap_or_default()) {
            let Some(limit) = limit else { continue };
            for (number, value) in numbers.iter().zip([limit.hard, limit.soft, limit.soft_seconds]) {
                number.store(value, Ordering::Relaxed);
            }
        }
    }

    /// Parses the setting; classes that are not named are `None`.
    pub(crate) fn read(text: &str) -> Result<[Option<Limit>; 3], String> {
        let words: Vec<&str> = text.split_whitespace().collect();
        if !words.len().is_multiple_of(4) {
            return Err("Wrong number of arguments in buffer limit configuration.".to_owned());
        }
        let mut limits = [None; 3];
        for words in words.chunks(4) {
            let name = if words[0].eq_ignore_ascii_case("replica") { "slave" } else { words[0] };
            let class = CLASSES.iter().position(|class| name.eq_ignore_ascii_case(class));
            let class = class.ok_or("Invalid client class specified in buffer limit configuration.")?;
            let wrong = "Error in hard, soft or soft_seconds setting in buffer limit configuration.";
            limits[class] = Some(Limit {
                hard: bytes(words[1]).ok_or(wrong)?,
                soft: bytes(words[2]).ok_or(wrong)?,
                soft_seconds: words[3].parse().map_err(|_| wrong)?,
            });
        }
        Ok(limits)
    }

    pub(crate) fn write(limits: [Option<Limit>; 3]) -> String {
        let show = |(name, limit): (&&str, Option<Limit>)| {
            let Limit { hard, soft, soft_seconds } = limit.unwrap_or_default();
            format!("{name} {hard} {soft} {soft_seconds}")
        };
        CLASSES.iter().zip(limits).map(show).collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unnamed_client_classes_keep_their_output_buffer_limits() {
        let settings = crate::settings::Settings::default();
        let set =
            |value: &str| settings.set_all(&[("client-output-buffer-limit".to_owned(), value.to_owned())]);
        let before = Limit { hard: 33_554_432, soft: 8_388_608, soft_seconds: 60 };
        assert_eq!(settings.output.get(Class::PubSub), before);
        assert_eq!(settings.output.get(Class::Normal), Limit::default());
        set("pubsub 1mb 2k 3").unwrap();
        assert_eq!(settings.output.get(Class::PubSub), Limit { hard: 1 << 20, soft: 2_000, soft_seconds: 3 });
        assert_eq!(
            settings.get("client-output-buffer-limit").unwrap(),
            "normal 0 0 0 slave 268435456 67108864 60 pubsub 1048576 2000 3"
        );
        set("normal 7 0 0 replica 1 2 3").unwrap();
        assert_eq!(settings.output.get(Class::Normal).hard, 7);
        for wrong in ["pubsub 1", "other 1 2 3", "pubsub x 2 3", "pubsub 1 2 x"] {
            assert!(set(wrong).is_err(), "{wrong}");
        }
    }
}
