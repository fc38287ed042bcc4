//! The identity of a data folder in the group: written once, before the first message in its name, and never
//! changed.

use std::io::Write as _;

use serde::{Deserialize, Serialize};

use super::join::JoinTicket;
use super::{GroupConfig, GroupError};

const FILE: &str = "group.json";

/// A founder; its folder has a random id.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Founder {
    pub(super) node_id: String,
    pub(super) address: String,
    pub(super) directory: String,
    pub(super) voter: u64,
    /// Its part of the group's secret. FounderState to other founders until they agree, and never afterwards.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) nonce: String,
}

/// Content of `group.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) app: String,
    pub(super) node_id: String,
    /// Directory id, random, drawn when the folder was first used.
    pub(super) directory: String,
    /// Cluster id of the group, in hexadecimal; empty until the founders agreed.
    pub(super) cluster: String,
    /// Voter id; 0 until the founders agreed.
    pub(super) voter: u64,
    /// The founders, if this member is one of them.
    pub(super) founders: Vec<Founder>,
    /// This folder's part of the secret of a group that it founds. Empty in a folder of a version without
    /// group secrets.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) nonce: String,
    /// Shared secret of the group's members, in hexadecimal; empty in a group of a version without group
    /// secrets.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) secret: String,
    /// Ticket of a join that is not known to be completed; until then the voter id is used for nothing else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) joining: Option<JoinTicket>,
}

/// A random directory id for a new folder.
pub(super) fn directory() -> String {
    format!("{:032x}", fastrand::u128(1..))
}

impl Identity {
    pub(super) fn new(config: &GroupConfig) -> Self {
        Self {
            app: config.app.clone(),
            node_id: config.node_id.clone(),
            directory: directory(),
            cluster: String::new(),
            voter: 0,
            founders: Vec::new(),
            nonce: directory(),
            secret: String::new(),
            joining: None,
        }
    }

    /// The secret as a number, for the peer port.
    pub(super) fn secret_number(&self) -> u128 {
        u128::from_str_radix(&self.secret, 16).unwrap_or(0)
    }

    /// Moves the content of an expired join's folder aside, so that the next join starts with an empty
    /// folder. This member was never a voter of the group, so it acknowledged nothing in it.
    pub(super) fn set_aside(&self, config: &GroupConfig) -> Result<(), GroupError> {
        let failed =
            |error: std::io::Error| GroupError::Folder(format!("{}: {error}", config.data.display()));
        let aside = config.data.join(format!("expired-join-{}", self.voter));
        std::fs::create_dir_all(&aside).map_err(failed)?;
        // The identity file moves last: a crash before that leaves the join as it was.
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&config.data).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            if name != FILE && !name.to_string_lossy().starts_with("expired-join-") {
                names.push(name);
            }
        }
        names.push(FILE.into());
        for name in names {
            std::fs::rename(config.data.join(&name), aside.join(&name)).map_err(failed)?;
        }
        std::fs::File::open(&config.data).and_then(|folder| folder.sync_all()).map_err(failed)
    }

    pub(super) fn load(config: &GroupConfig) -> Result<Option<Self>, GroupError> {
        let file = config.data.join(FILE);
        let bytes = match std::fs::read(&file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(GroupError::Folder(format!("{}: {error}", file.display()))),
        };
        let identity: Self = serde_json::from_slice(&bytes)
            .map_err(|error| GroupError::Folder(format!("{}: {error}", file.display())))?;
        if identity.app != config.app || identity.node_id != config.node_id {
            let owner = format!("{} of {}", identity.node_id, identity.app);
            return Err(GroupError::Folder(format!("{} belongs to {owner}", config.data.display())));
        }
        Ok(Some(identity))
    }

    /// Temporary file, fsync, rename: an atomic replacement.
    pub(super) fn save(&self, config: &GroupConfig) -> Result<(), GroupError> {
        let failed = |error: std::io::Error| GroupError::Folder(error.to_string());
        std::fs::create_dir_all(&config.data).map_err(failed)?;
        let (file, aside) = (config.data.join(FILE), config.data.join("group.json.new"));
        let bytes = serde_json::to_vec_pretty(self).expect("plain fields serialize to JSON");
        let mut out = std::fs::File::create(&aside).map_err(failed)?;
        out.write_all(&bytes).and_then(|()| out.sync_all()).map_err(failed)?;
        std::fs::rename(&aside, &file).map_err(failed)?;
        std::fs::File::open(&config.data).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}
