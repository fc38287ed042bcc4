//! The command line as people type it.

use clap::CommandFactory as _;

use super::*;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(split(line))
}

/// Splits as a shell does, as far as our examples go: blanks, quotes, comments, pipes and redirections.
fn split(line: &str) -> Vec<String> {
    let mut words = vec![];
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '#' | '|' | '<' | '>') => break,
            (None, ' ') => words.extend(word.take()),
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

fn each_command(command: &clap::Command, path: &str, visit: &mut impl FnMut(&str, &clap::Command)) {
    visit(path, command);
    for sub in command.get_subcommands() {
        each_command(sub, &format!("{path} {}", sub.get_name()), visit);
    }
}

#[test]
fn the_definition_is_sound() {
    Cli::command().debug_assert();
}

#[test]
fn every_verb_has_an_example_and_every_example_parses() {
    let mut examples = 0;
    each_command(&Cli::command(), "moim", &mut |path, command| {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        let is_verb = command.get_subcommands().next().is_none();
        assert!(!is_verb || help.contains("Example:"), "{path} has no example");
        for line in help.lines().filter(|line| line.starts_with("  ")) {
            let Some(at) = line.find("moim ") else { continue };
            if let Err(error) = parse(&line[at..]) {
                panic!("{line}\n{error}");
            }
            examples += 1;
        }
    });
    assert!(examples >= 10, "only {examples} examples found");
}

#[test]
fn flags_of_later_layers_pass_when_they_ask_for_nothing() {
    for (flags, wanted) in [
        ("", None),
        ("--redis-port 0 --roles queue,slots,coord", None),
        ("--coord etcd://a:1", Some("--coord: an etcd of your own is not part of this build yet")),
        (
            "--roles queue,slots",
            Some("--roles queue,slots: only `queue,slots,coord` is part of this build yet"),
        ),
    ] {
        let Command::Serve(args) = parse(&format!("moim serve {flags}")).unwrap().command else { panic!() };
        let got = args.flag_values().err().map(|failure| failure.message);
        assert_eq!(got.as_deref(), wanted, "{flags}");
    }
}

#[test]
fn serve_flags_become_values_of_the_configuration() {
    let line = "moim serve --node-id 3 --data d --host ::1 --kafka-port 0 --admin-port 1 --advertise-kafka a:1 \
                --zone z --insecure --log-level debug --etcd-port 2 --peer-port 3 --advertise-etcd b:1 \
                --advertise-peer c:1 --initial-cluster 3=c:1,4=d:1";
    let Command::Serve(args) = parse(line).unwrap().command else { panic!() };
    let values = args.flag_values().unwrap();
    let effective = crate::config::layers::load(None, std::iter::empty(), &values).unwrap();
    let config = effective.config;
    assert_eq!((config.node.id, config.node.data.as_str(), config.node.host.as_str()), (3, "d", "::1"));
    assert_eq!((config.kafka.port, config.admin.port, config.kafka.advertise.as_str()), (0, 1, "a:1"));
    assert_eq!(
        (config.node.zone.as_str(), config.node.insecure, config.node.log_level.as_str()),
        ("z", true, "debug")
    );
    assert_eq!((config.etcd.port, config.etcd.advertise.as_str()), (2, "b:1"));
    assert_eq!((config.peer.port, config.peer.advertise.as_str()), (3, "c:1"));
    assert_eq!(config.cluster.initial, "3=c:1,4=d:1");
}

#[test]
fn a_wrong_command_line_is_a_usage_error() {
    for line in ["moim frobnicate", "moim serve --kafka-port x", "moim topic create", "moim -o xml version"] {
        assert_eq!(parse(line).unwrap_err().exit_code(), 2, "{line}");
    }
}

#[test]
fn the_output_format_may_stand_anywhere() {
    for line in ["moim -o json version", "moim version -o json", "moim topic list --output json"] {
        assert_eq!(parse(line).unwrap().output, Format::Json, "{line}");
    }
}
