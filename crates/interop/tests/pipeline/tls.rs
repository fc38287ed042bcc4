//! TLS between clients and gateways: a client with the right authority connects, a client without it is refused.

use std::process::Command;

use crate::gateway::Pipeline;

/// A self-signed certificate for 127.0.0.1, and its key.
fn certificate(folder: &std::path::Path, name: &str) -> (String, String) {
    let file = |end: &str| folder.join(format!("{name}.{end}")).display().to_string();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args([
            "-days",
            "3650",
            "-subj",
            &format!("/CN={name}"),
            "-keyout",
            &file("key"),
            "-out",
            &file("pem"),
        ])
        .args(["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    (file("pem"), file("key"))
}

#[test]
fn gateway_with_tls_serves_clients_that_trust_its_certificate() {
    let has_openssl = Command::new("openssl").arg("version").output().is_ok_and(|o| o.status.success());
    if !has_openssl {
        eprintln!("not tried: there is no openssl to make a certificate with");
        return;
    }
    let _turn = super::one_at_a_time();
    let folder = tempfile::tempdir().unwrap();
    let (cert, key) = certificate(folder.path(), "gateway");
    let (other, _) = certificate(folder.path(), "stranger");
    let pipeline = Pipeline::start("gateway", &["--tls-cert", &cert, "--tls-key", &key]);
    std::fs::write(pipeline.folder().join("text"), "a\nb\n").unwrap();
    let load = |more: &[&str]| {
        let mut args = vec!["--file", "text", "--client", "ann", "--patience", "1s"];
        args.extend(more);
        pipeline.load(&args)
    };
    let fine = load(&["--tls-ca", &cert]);
    assert!(fine.status.success(), "{}", String::from_utf8_lossy(&fine.stderr));
    for wrong in [&["--tls-ca", &other][..], &["--tls-ca", &cert, "--tls-name", "elsewhere.example"], &[]] {
        let refused = load(wrong);
        assert_eq!(refused.status.code(), Some(4), "{wrong:?}: {}", String::from_utf8_lossy(&refused.stderr));
    }
}
