//! Who this folder is in the group: written once, before it first speaks for itself, and never changed.

use std::io::Write as _;

use serde::{Deserialize, Serialize};

use super::{GroupConfig, GroupError};

const FILE: &str = "group.json";

/// A founder: its folder is named by what it drew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Founder {
    pub(super) node_id: String,
    pub(super) address: String,
    pub(super) directory: String,
    pub(super) voter: u64,
}

/// What `group.json` holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Identity {
    pub(super) app: String,
    pub(super) node_id: String,
    /// Drawn when the folder was first used.
    pub(super) directory: String,
    /// The group's name among all groups, in hexadecimal; empty until the founders agreed.
    pub(super) cluster: String,
    /// 0 until the founders agreed.
    pub(super) voter: u64,
    /// Those of the first hour, for a member that is one of them.
    pub(super) founders: Vec<Founder>,
}

/// A name for a new folder.
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
        }
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

    /// Written aside, synced, renamed: whole or not there.
    pub(super) fn save(&self, config: &GroupConfig) -> Result<(), GroupError> {
        let failed = |error: std::io::Error| GroupError::Folder(error.to_string());
        std::fs::create_dir_all(&config.data).map_err(failed)?;
        let (file, aside) = (config.data.join(FILE), config.data.join("group.json.new"));
        let bytes = serde_json::to_vec_pretty(self).expect("plain fields can be written down");
        let mut out = std::fs::File::create(&aside).map_err(failed)?;
        out.write_all(&bytes).and_then(|()| out.sync_all()).map_err(failed)?;
        std::fs::rename(&aside, &file).map_err(failed)?;
        std::fs::File::open(&config.data).and_then(|folder| folder.sync_all()).map_err(failed)
    }
}
