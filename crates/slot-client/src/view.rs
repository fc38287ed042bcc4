//! Cluster views (CLUSTER NODES), and the choice between conflicting views.
//!
//! Everything here is pure. Nodes may disagree: an isolated node has a stale view. Two rules choose:
//! - **healthy majority**, for the first load: the view with the most nodes that are not failing. Nothing is
//!   known yet, so the view with the most usable nodes is the best.
//! - **known majority**, later: the view with the most known nodes. A node of another cluster, or a reset
//!   node, cannot redirect the client to another cluster.
//!
//! Ties go to the view with the highest configuration epoch: it includes the latest failover. Limits: a
//! majority of stale nodes wins; a view is accepted as a whole or not at all.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use moim_wire_resp::Slot;

use crate::address::Address;

/// A node in a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Node id: forty hexadecimal digits, by convention.
    pub id: String,
    /// Advertised address for clients.
    pub address: Address,
    /// The id of its primary, for a replica.
    pub replica_of: Option<String>,
    /// Marked as failing, or not yet part of the cluster.
    pub failing: bool,
    /// Configuration epoch; grows with every failover.
    pub config_epoch: u64,
    /// The slots it owns.
    pub slots: Vec<RangeInclusive<u16>>,
}

impl NodeInfo {
    /// True for a primary, with or without slots.
    pub fn is_primary(&self) -> bool {
        self.replica_of.is_none()
    }
}

/// The cluster as seen by one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// The nodes, without those that have no address.
    pub nodes: Vec<NodeInfo>,
}

impl View {
    /// Parses CLUSTER NODES of a node that was reached at `host`. Malformed lines are skipped; `None` when
    /// no line is valid.
    pub fn parse(text: &str, host: &str) -> Option<Self> {
        let nodes: Vec<_> = text.lines().filter_map(|line| parse_line(line, host)).collect();
        (!nodes.is_empty()).then_some(Self { nodes })
    }

    /// The view of a server without cluster mode: one node owns all slots.
    pub(crate) fn single(address: Address) -> Self {
        let node = NodeInfo {
            id: address.to_string(),
            address,
            replica_of: None,
            failing: false,
            config_epoch: 0,
            slots: vec![0..=Slot::COUNT - 1],
        };
        Self { nodes: vec![node] }
    }

    fn healthy(&self) -> usize {
        self.nodes.iter().filter(|node| !node.failing).count()
    }

    fn known(&self, known: &HashSet<&str>) -> usize {
        self.nodes.iter().filter(|node| known.contains(node.id.as_str())).count()
    }

    /// Recency: the highest epoch, then the sum of all epochs.
    fn epoch(&self) -> (u64, u64) {
        let primaries = || self.nodes.iter().filter(|node| node.is_primary()).map(|node| node.config_epoch);
        (primaries().max().unwrap_or(0), primaries().fold(0, u64::saturating_add))
    }
}

/// `id ip:port@cport[,hostname] flags primary ping pong epoch link slot…`
fn parse_line(line: &str, host: &str) -> Option<NodeInfo> {
    let mut words = line.split_ascii_whitespace();
    let id = words.next()?;
    let place = words.next()?;
    let flags = words.next()?;
    let primary = words.next()?;
    let mut words = words.skip(2);
    let config_epoch = words.next()?.parse().ok()?;
    let link = words.next()?;
    let flag = |name: &str| flags.split(',').any(|flag| flag == name);
    let (place, name) = place.split_once(',').unwrap_or((place, ""));
    let place = place.split_once('@').map_or(place, |(place, _)| place);
    let mut address = Address::parse(place)?;
    if address.host.is_empty() && !flag("myself") && !name.is_empty() {
        address.host = name.split(',').next().unwrap_or_default().to_owned();
    }
    let address = address.or_host(host);
    if flag("noaddr") || flag("handshake") || address.port == 0 {
        return None;
    }
    Some(NodeInfo {
        id: id.to_owned(),
        address,
        replica_of: (primary != "-").then(|| primary.to_owned()),
        // A node has no link to itself; the link to others is more reliable than a suspicion (`fail?`).
        failing: flag("fail") || (flag("fail?") && link != "connected"),
        config_epoch,
        slots: words.filter_map(parse_slots).collect(),
    })
}

/// `5`, `5-10`; migrating slots (`[5->-id]`) are skipped.
fn parse_slots(word: &str) -> Option<RangeInclusive<u16>> {
    if word.starts_with('[') {
        return None;
    }
    let (first, last) = word.split_once('-').unwrap_or((word, word));
    let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last < Slot::COUNT).then_some(first..=last)
}

/// The index of the chosen view, given the current one (`None` before the first load). The first among
/// equals.
pub fn choose(known: Option<&View>, views: &[View]) -> Option<usize> {
    match known {
        None => best(views, |view| view.healthy()),
        Some(known) => {
            let ids: HashSet<&str> = known.nodes.iter().map(|node| node.id.as_str()).collect();
            best(views, |view| view.known(&ids))
        }
    }
}

fn best(views: &[View], votes: impl Fn(&View) -> usize) -> Option<usize> {
    let rank = |index: usize| (votes(&views[index]), views[index].epoch());
    (0..views.len()).reduce(|best, next| if rank(next) > rank(best) { next } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REAL: &str = "\
07c37dfeb235213a872192d90877d0cd55635b91 127.0.0.1:30004@31004,host4 slave e7d1eecce10fd6bb5eb35b9f99a514335d9ba9ca 0 1426238317239 4 connected
67ed2db8d677e59ec4a4cefb06858cf2a1a89fa1 127.0.0.1:30002@31002 master - 0 1426238316232 2 connected 5461-10922
292f8b365bb7edb5e285caf0b7e6ddc7265d2f4f 127.0.0.1:30003@31003 master,fail - 0 1426238318243 3 disconnected 10923-16383
6ec23923021cf3ffec47632106199cb7f496ce01 :0@0 slave,noaddr 67ed2db8d677e59ec4a4cefb06858cf2a1a89fa1 0 0 5 disconnected
e7d1eecce10fd6bb5eb35b9f99a514335d9ba9ca :30001@31001 myself,master - 0 0 1 connected 0-5459 5460 [5461->-67ed2db8d677e59ec4a4cefb06858cf2a1a89fa1]
";

    #[test]
    fn cluster_nodes_is_parsed() {
        let view = View::parse(REAL, "10.0.0.9").unwrap();
        let seen: Vec<_> = view
            .nodes
            .iter()
            .map(|node| {
                (
                    node.address.to_string(),
                    node.is_primary(),
                    node.failing,
                    node.config_epoch,
                    node.slots.clone(),
                )
            })
            .collect();
        assert_eq!(
            seen,
            [
                ("127.0.0.1:30004".to_owned(), false, false, 4, vec![]),
                ("127.0.0.1:30002".to_owned(), true, false, 2, vec![5461..=10922]),
                ("127.0.0.1:30003".to_owned(), true, true, 3, vec![10923..=16383]),
                ("10.0.0.9:30001".to_owned(), true, false, 1, vec![0..=5459, 5460..=5460]),
            ]
        );
        assert_eq!(View::parse("garbage\n", "h"), None);
    }

    /// A view of primaries by letter; capital letters fail, a digit after a letter is its epoch.
    fn view(text: &str) -> View {
        let mut nodes: Vec<NodeInfo> = Vec::new();
        for letter in text.chars() {
            match letter.to_digit(10) {
                Some(epoch) => nodes.last_mut().unwrap().config_epoch = epoch.into(),
                None => nodes.push(NodeInfo {
                    id: letter.to_ascii_lowercase().to_string(),
                    address: Address::new(letter.to_ascii_lowercase(), 1),
                    replica_of: None,
                    failing: letter.is_ascii_uppercase(),
                    config_epoch: 0,
                    slots: vec![],
                }),
            }
        }
        View { nodes }
    }

    fn check(known: Option<&str>, views: &[&str], expected: usize) {
        let all: Vec<_> = views.iter().map(|text| view(text)).collect();
        let known_view = known.map(view);
        assert_eq!(choose(known_view.as_ref(), &all), Some(expected), "known {known:?}, views {views:?}");
    }

    #[test]
    fn first_load_chooses_the_view_with_most_healthy_nodes() {
        // Two nodes see all nodes, one is isolated and marks the others as failing.
        check(None, &["aBC", "abc", "abc"], 1);
        // A view with more nodes that are failing does not win by their number.
        check(None, &["abcDEF", "abcd"], 1);
        // A reset node knows only itself.
        check(None, &["x", "abc"], 1);
    }

    #[test]
    fn later_loads_choose_the_view_with_most_known_nodes() {
        // A healthy cluster of unknown nodes is larger, but it is another cluster.
        check(Some("abc"), &["xyzuvw", "abc"], 1);
        // A failing node is still a known one: after a failover the partition without it must not be
        // preferred.
        check(Some("abc"), &["ab", "abC"], 1);
        // One node left the cluster: views with and without it tie on the known nodes.
        check(Some("abc"), &["ab", "abd"], 0);
    }

    #[test]
    fn ties_go_to_the_highest_configuration_epoch() {
        // After a failover b took over with epoch 7; a has a stale view.
        check(Some("abc"), &["a1b2c3", "a1b7c3", "a1b2c3"], 1);
        check(None, &["a1b2c3", "a1b2c4"], 1);
        // The same highest epoch: the higher sum of epochs wins.
        check(None, &["a1b1c7", "a1b2c7"], 1);
        // Equal in everything: the first.
        check(None, &["abc", "abc"], 0);
        assert_eq!(choose(None, &[]), None);
    }
}
