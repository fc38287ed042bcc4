//! The cluster as one node describes it (CLUSTER NODES), and which of several descriptions to believe.
//!
//! Everything here is pure. Nodes may disagree: one that was cut off believes old things with conviction. Two rules choose:
//! - **healthy majority**, for the first load: the view with the most nodes that do not fail. Nothing is known yet, so the
//!   view that can do the most is the best.
//! - **known majority**, later: the view with the most nodes we know already. A node of another cluster, or one that was
//!   reset, cannot take us along.
//!
//! Ties go to the view with the highest configuration epoch: it has seen the latest failover. Limits: a majority of nodes that
//! are wrong together wins; a view is believed as a whole or not at all.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use moim_wire_resp::Slot;

use crate::address::Address;

/// A node as another node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Forty hexadecimal digits, by convention.
    pub id: String,
    /// Where clients reach it.
    pub address: Address,
    /// Whether it is a replica, and whose.
    pub replica_of: Option<String>,
    /// Believed to be failing, or not yet part of the cluster.
    pub failing: bool,
    /// When its slots were last decided; grows with every failover.
    pub config_epoch: u64,
    /// The slots it owns.
    pub slots: Vec<RangeInclusive<u16>>,
}

impl NodeInfo {
    /// Whether it owns slots or could.
    pub fn is_primary(&self) -> bool {
        self.replica_of.is_none()
    }
}

/// The cluster as one node sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct View {
    /// Its nodes, those without an address left out.
    pub nodes: Vec<NodeInfo>,
}

impl View {
    /// Reads CLUSTER NODES as answered by a node that was reached at `host`. Lines that make no sense are left out; `None`
    /// when none makes sense.
    pub fn parse(text: &str, host: &str) -> Option<Self> {
        let nodes: Vec<_> = text.lines().filter_map(|line| parse_line(line, host)).collect();
        (!nodes.is_empty()).then_some(Self { nodes })
    }

    /// A server that is no cluster: one node has everything.
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

    /// How recent it is: the highest epoch, then all epochs together.
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
        // A node's link to itself does not exist; to others it tells more than a suspicion (`fail?`).
        failing: flag("fail") || (flag("fail?") && link != "connected"),
        config_epoch,
        slots: words.filter_map(parse_slots).collect(),
    })
}

/// `5`, `5-10`; slots on their way (`[5->-id]`) are left out.
fn parse_slots(word: &str) -> Option<RangeInclusive<u16>> {
    if word.starts_with('[') {
        return None;
    }
    let (first, last) = word.split_once('-').unwrap_or((word, word));
    let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last < Slot::COUNT).then_some(first..=last)
}

/// Which of `views` to believe, given what we know (`None` before the first load). The first among equals.
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
    fn cluster_nodes_is_read() {
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
    fn the_first_load_believes_the_view_with_most_healthy_nodes() {
        // Two nodes see everybody, one was cut off and believes the others fail.
        check(None, &["aBC", "abc", "abc"], 1);
        // A view that knows more, but failing nodes, does not win by their number.
        check(None, &["abcDEF", "abcd"], 1);
        // A node that was reset knows itself alone.
        check(None, &["x", "abc"], 1);
    }

    #[test]
    fn later_loads_believe_the_view_with_most_known_nodes() {
        // A healthy cluster of strangers is larger, but it is not ours.
        check(Some("abc"), &["xyzuvw", "abc"], 1);
        // A failing node is still a known one: a failover must not make us prefer the partition that lost it.
        check(Some("abc"), &["ab", "abC"], 1);
        // One node left: the views that still list it and those that do not tie on the known ones.
        check(Some("abc"), &["ab", "abd"], 0);
    }

    #[test]
    fn ties_go_to_the_highest_configuration_epoch() {
        // After a failover b took over with epoch 7; a has not heard of it.
        check(Some("abc"), &["a1b2c3", "a1b7c3", "a1b2c3"], 1);
        check(None, &["a1b2c3", "a1b2c4"], 1);
        // The same highest epoch: more recent in all counts.
        check(None, &["a1b1c7", "a1b2c7"], 1);
        // Equal in everything: the first.
        check(None, &["abc", "abc"], 0);
        assert_eq!(choose(None, &[]), None);
    }
}
