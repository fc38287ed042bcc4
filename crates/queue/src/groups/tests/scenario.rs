//! Runs the scenario files. A file is a list of blocks: a command, `----`, and the expected output, up to an empty
//! line. `MOIM_REWRITE=1 cargo test` writes the actual output; review the difference.
//!
//! Commands (NAME is a client; it remembers its member id and generation as a real client does):
//! `config KEY=MS…` · `join NAME [group=] [instance=] [v=] [session=] [rebalance=] [protocols=a,b] [topics=a,b] [fresh]`
//! · `sync NAME [give=NAME:TEXT,…] [protocol=]` · `heartbeat NAME… [generation=]` · `leave NAME…|instance=I`
//! · `commit NAME TOPIC PARTITION OFFSET [generation=]` · `fetch GROUP` · `describe GROUP` · `list [state=]`
//! · `delete GROUP` · `hold` / `release [error]` (writes wait / continue) · `wait MS` · `restart`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;

use super::harness::{Harness, commit_topics, config, join, simple_commit, subscription};
use crate::groups::*;

#[test]
fn scenarios() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/groups/scenarios");
    let mut ran = 0;
    let mut wrong = Vec::new();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let printed = run(&text);
        ran += 1;
        if printed != text && std::env::var_os("MOIM_REWRITE").is_some() {
            std::fs::write(&path, printed).unwrap();
        } else if printed != text {
            let differs = text.lines().zip(printed.lines()).find(|(a, b)| a != b);
            wrong.push(format!("{}: expected, got {differs:#?}", path.display()));
        }
    }
    assert!(ran >= 8, "scenario files are missing");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn run(text: &str) -> String {
    let mut stage = Stage::new();
    let mut out = String::new();
    let mut in_expected = false;
    for line in text.lines() {
        match line {
            "----" => in_expected = true,
            "" => {
                in_expected = false;
                out.push('\n');
            }
            _ if in_expected => {}
            _ if line.starts_with('#') => writeln!(out, "{line}").unwrap(),
            command => {
                writeln!(out, "{command}\n----").unwrap();
                stage.run(command);
                out.push_str(&std::mem::take(&mut stage.out));
            }
        }
    }
    format!("{}\n", out.trim_end())
}

#[derive(Default, Clone)]
struct Client {
    group: Arc<str>,
    id: Arc<str>,
    instance: Option<Arc<str>>,
    generation: i32,
}

struct Stage {
    harness: Harness,
    clients: BTreeMap<String, Client>,
    waiting: Vec<(Token, String)>,
    hold: bool,
    out: String,
}

/// `key=value` arguments and the plain ones.
struct Args<'a> {
    plain: Vec<&'a str>,
    named: BTreeMap<&'a str, &'a str>,
}

impl<'a> Args<'a> {
    fn parse(text: &'a str) -> (&'a str, Self) {
        let mut words = text.split_whitespace();
        let verb = words.next().unwrap_or_default();
        let (mut plain, mut named) = (Vec::new(), BTreeMap::new());
        for word in words {
            match word.split_once('=') {
                Some((key, value)) => drop(named.insert(key, value)),
                None => plain.push(word),
            }
        }
        (verb, Self { plain, named })
    }

    fn number(&self, key: &str) -> Option<i64> {
        self.named.get(key).map(|text| text.parse().unwrap())
    }

    fn list(&self, key: &str, default: &'a str) -> Vec<&'a str> {
        self.named.get(key).unwrap_or(&default).split(',').filter(|text| !text.is_empty()).collect()
    }
}

impl Stage {
    fn new() -> Self {
        Self {
            harness: Harness::new(config()),
            clients: BTreeMap::new(),
            waiting: Vec::new(),
            hold: false,
            out: String::new(),
        }
    }

    fn run(&mut self, command: &str) {
        let (verb, args) = Args::parse(command);
        match verb {
            "config" => self.configure(&args),
            "join" => self.join(&args),
            "sync" => self.sync(&args),
            "heartbeat" => self.heartbeat(&args),
            "leave" => self.leave(&args),
            "commit" => self.commit(&args),
            "hold" => self.hold = true,
            "release" => self.release(&args),
            "wait" => self.harness.advance(args.plain[0].parse().unwrap()),
            "restart" => {
                self.harness.restart();
                self.waiting.clear();
            }
            _ => self.query(verb, &args),
        }
        if !self.hold {
            self.harness.write_all();
        }
        self.print_answers();
    }

    fn configure(&mut self, args: &Args<'_>) {
        let mut config = config();
        config.initial_rebalance_delay_ms = args.number("delay").unwrap_or(0) as u64;
        config.max_group_size = args.number("size").unwrap_or(1000) as usize;
        config.offset_retention_ms = args.number("retention").unwrap_or(config.offset_retention_ms);
        config.min_session_timeout_ms = args.number("session").unwrap_or(10) as i32;
        self.harness = Harness::new(config);
    }

    fn release(&mut self, args: &Args<'_>) {
        self.hold = false;
        if args.plain.contains(&"error") {
            while self.harness.write_one(Err(ErrorCode::NotLeaderOrFollower)) {}
        }
    }

    fn join(&mut self, args: &Args<'_>) {
        let name = args.plain[0];
        let client = self.clients.entry(name.to_owned()).or_default();
        if args.plain.contains(&"fresh") {
            client.id = Arc::default();
        }
        if client.group.is_empty() {
            client.group = "g".into();
        }
        if let Some(group) = args.named.get("group") {
            client.group = (*group).into();
        }
        if let Some(instance) = args.named.get("instance") {
            client.instance = Some((*instance).into());
        }
        let version = args.number("v").unwrap_or(3);
        let metadata = subscription(&args.list("topics", "t"));
        let mut request = join(&client.group, name, &client.id, &[]);
        request.instance_id = client.instance.clone();
        request.session_timeout_ms = args.number("session").unwrap_or(10_000) as i32;
        request.rebalance_timeout_ms = args.number("rebalance").unwrap_or(60_000) as i32;
        request.protocol_type = (*args.named.get("type").unwrap_or(&"consumer")).into();
        let protocols = args.list("protocols", "range").into_iter();
        request.protocols =
            protocols.map(|name| Protocol { name: name.into(), metadata: metadata.clone() }).collect();
        request.require_known_member_id = version >= 4 && client.instance.is_none();
        request.can_skip_assignment = version >= 9;
        let token = self.harness.ask(|token| Input::Join(token, request));
        self.waiting.push((token, name.to_owned()));
    }

    fn sync(&mut self, args: &Args<'_>) {
        let name = args.plain[0];
        let client = self.clients[name].clone();
        let give = args.list("give", "").into_iter().filter_map(|pair| pair.split_once(':'));
        let assignments = give
            .map(|(to, text)| (self.clients[to].id.clone(), Bytes::copy_from_slice(text.as_bytes())))
            .collect();
        let request = Sync {
            group: client.group,
            generation: args.number("generation").map_or(client.generation, |g| g as i32),
            member_id: client.id,
            instance_id: client.instance,
            protocol_type: None,
            protocol: args.named.get("protocol").map(|text| (*text).into()),
            assignments,
        };
        let token = self.harness.ask(|token| Input::Sync(token, request));
        self.waiting.push((token, name.to_owned()));
    }

    fn heartbeat(&mut self, args: &Args<'_>) {
        for name in &args.plain {
            let client = self.clients[*name].clone();
            let request = Heartbeat {
                group: client.group,
                generation: args.number("generation").map_or(client.generation, |g| g as i32),
                member_id: client.id,
                instance_id: client.instance,
            };
            let token = self.harness.ask(|token| Input::Heartbeat(token, request));
            self.waiting.push((token, (*name).to_owned()));
        }
    }

    fn leave(&mut self, args: &Args<'_>) {
        let mut members = Vec::new();
        for name in &args.plain {
            let Client { id, instance, .. } = self.clients[*name].clone();
            members.push(LeavingMember { member_id: id, instance_id: instance, reason: None });
        }
        if let Some(instance) = args.named.get("instance") {
            let instance_id = Some((*instance).into());
            members.push(LeavingMember { member_id: Arc::default(), instance_id, reason: None });
        }
        let request = Leave { group: "g".into(), members };
        let token = self.harness.ask(|token| Input::Leave(token, request));
        self.waiting.push((token, "leave".to_owned()));
    }

    fn commit(&mut self, args: &Args<'_>) {
        let [name, topic, partition, offset] = args.plain[..] else {
            panic!("commit NAME TOPIC PARTITION OFFSET")
        };
        let offsets = [(topic, partition.parse().unwrap(), offset.parse().unwrap())];
        let request = match self.clients.get(name).cloned() {
            None => simple_commit("g", &offsets),
            Some(client) => OffsetCommit {
                group: client.group,
                generation: args.number("generation").map_or(client.generation, |g| g as i32),
                member_id: client.id,
                instance_id: client.instance,
                retention_ms: None,
                topics: commit_topics(&offsets),
            },
        };
        let token = self.harness.ask(|token| Input::OffsetCommit(token, request));
        self.waiting.push((token, name.to_owned()));
    }

    fn query(&mut self, verb: &str, args: &Args<'_>) {
        let group: Arc<str> = args.plain.first().copied().unwrap_or("g").into();
        let name = group.to_string();
        let token = self.harness.ask(|token| match verb {
            "fetch" => {
                Input::OffsetFetch(token, vec![OffsetFetch { group, topics: None, require_stable: false }])
            }
            "describe" => Input::DescribeGroups(token, vec![group]),
            "delete" => Input::DeleteGroups(token, vec![group]),
            "list" => {
                let states = args.list("state", "").into_iter().map(str::to_owned).collect();
                Input::ListGroups(token, ListFilter { states, types: Vec::new() })
            }
            other => panic!("unknown command {other}"),
        });
        self.waiting.push((token, name));
    }

    fn print_answers(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        for (token, name) in waiting {
            match self.harness.take(token) {
                None => self.waiting.push((token, name)),
                Some(response) => self.print(&name, &response),
            }
        }
        for (_, name) in &self.waiting {
            writeln!(self.out, "{name}: …").unwrap();
        }
    }

    fn alias(&self, id: &str) -> String {
        let known = self.clients.iter().find(|(_, client)| client.id.as_ref() == id && !id.is_empty());
        match known {
            Some((name, _)) => name.clone(),
            None if id.is_empty() => "-".to_owned(),
            None => "(an old id)".to_owned(),
        }
    }

    fn print(&mut self, name: &str, response: &Response) {
        let line = match response {
            Response::Join(join) => self.joined(name, join),
            Response::Sync(sync) if sync.error == ErrorCode::None => {
                format!("assigned {:?}", String::from_utf8_lossy(&sync.assignment))
            }
            Response::Sync(sync) => format!("{:?}", sync.error),
            Response::Heartbeat(error) => format!("{error:?}"),
            Response::Leave(leave) => {
                let errors: Vec<_> = leave.members.iter().map(|(_, error)| error).collect();
                format!("{:?} {errors:?}", leave.error)
            }
            Response::OffsetCommit(topics) => format!("{:?}", topics[0].partitions),
            Response::OffsetFetch(groups) => {
                let mut text = String::new();
                for topic in &groups[0].topics {
                    for p in &topic.partitions {
                        write!(text, "{}/{} at {} {:?} ", topic.topic, p.partition, p.offset, p.metadata)
                            .unwrap();
                    }
                }
                text.trim_end().to_owned()
            }
            Response::DescribeGroups(groups) => self.described(&groups[0]),
            Response::DeleteGroups(groups) => format!("{:?}", groups[0].1),
            Response::ListGroups(groups) => {
                let line = |g: &ListedGroup| format!("{} {}", g.group, g.state.name());
                groups.iter().map(line).collect::<Vec<_>>().join(", ")
            }
            Response::OffsetDelete(_) => unreachable!("no scenario sends it"),
        };
        let line = if line.is_empty() { "nothing" } else { &line };
        writeln!(self.out, "{name}: {line}").unwrap();
    }

    fn joined(&mut self, name: &str, join: &JoinResponse) -> String {
        let client = self.clients.get_mut(name).unwrap();
        let keeps_id = [ErrorCode::None, ErrorCode::MemberIdRequired].contains(&join.error);
        if keeps_id {
            client.id = join.member_id.clone();
        }
        if join.error != ErrorCode::None {
            return format!("{:?}", join.error);
        }
        client.generation = join.generation;
        let protocol = join.protocol.as_deref().unwrap_or_default();
        let mut line = format!("generation {} {protocol}", join.generation);
        if join.leader == join.member_id {
            let others: Vec<_> =
                join.members.iter().map(|m| m.instance_id.as_deref().unwrap_or("dynamic")).collect();
            write!(line, ", leads {others:?}").unwrap();
        }
        if join.skip_assignment {
            line.push_str(", need not assign");
        }
        line
    }

    fn described(&self, group: &DescribedGroup) -> String {
        let mut line = format!("{} {} {:?}", group.state.name(), group.protocol_type, group.protocol);
        for member in &group.members {
            let assignment = String::from_utf8_lossy(&member.assignment).into_owned();
            write!(line, "; {} {assignment:?}", self.alias(&member.member_id)).unwrap();
        }
        line
    }
}
