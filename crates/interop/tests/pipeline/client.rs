//! A client implemented from docs/pipeline.md alone, which sends what a correct client would not.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// A frame from the gateway.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Response {
    Welcome { acked: u64 },
    Refused { retry: bool, reason: String },
    Ack { acked: u64, beyond: Vec<u64> },
    Done,
    Closed,
}

/// A connection that is authenticated, or was refused.
pub(crate) struct Client {
    stream: TcpStream,
}

pub(crate) fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    frame.extend_from_slice(body);
    frame
}

pub(crate) fn hello(client: &[u8], incarnation: u64) -> Vec<u8> {
    let mut body = vec![1, 1];
    body.extend_from_slice(&incarnation.to_be_bytes());
    body.extend_from_slice(&[0; 16]);
    body.extend_from_slice(client);
    frame(&body)
}

pub(crate) fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_be_bytes(bytes[..8].try_into().unwrap())
}

impl Client {
    /// Authenticates as `name` with the secret in `folder`, and returns the gateway's response.
    pub(crate) fn authenticate(
        address: &str,
        folder: &Path,
        name: &str,
        incarnation: u64,
    ) -> (Self, Response) {
        let token = std::fs::read_to_string(folder.join(".moim/pipeline.token")).unwrap();
        let secret: Vec<u8> =
            (0..32).map(|at| u8::from_str_radix(&token[2 * at..2 * at + 2], 16).unwrap()).collect();
        let mut client = Self { stream: connect(address) };
        client.stream.write_all(&hello(name.as_bytes(), incarnation)).unwrap();
        let challenge = client.frame().expect("a challenge");
        assert_eq!(challenge[0], 2);
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret).unwrap();
        mac.update(b"moim pipeline 1");
        mac.update(&challenge[1..]);
        mac.update(&[0; 16]);
        mac.update(&incarnation.to_be_bytes());
        mac.update(name.as_bytes());
        let mut proof = vec![3];
        proof.extend_from_slice(&mac.finalize().into_bytes());
        client.write_frame(&proof);
        let response = client.read_response();
        (client, response)
    }

    pub(crate) fn write_frame(&mut self, body: &[u8]) {
        // The gateway may have closed the connection already: its response is read in any case.
        let _ = self.stream.write_all(&frame(body));
    }

    pub(crate) fn send(&mut self, sn: u64, message: &[u8]) {
        let mut body = vec![6];
        body.extend_from_slice(&sn.to_be_bytes());
        body.extend_from_slice(message);
        self.write_frame(&body);
    }

    pub(crate) fn bye(&mut self, sent: u64) {
        let mut body = vec![8];
        body.extend_from_slice(&sent.to_be_bytes());
        self.write_frame(&body);
    }

    /// The next frame that is not an acknowledgement.
    pub(crate) fn outcome(&mut self) -> Response {
        loop {
            match self.read_response() {
                Response::Ack { .. } => {}
                response => return response,
            }
        }
    }

    pub(crate) fn read_response(&mut self) -> Response {
        let Some(body) = self.frame() else { return Response::Closed };
        match body[0] {
            4 => Response::Welcome { acked: number(&body[1..]) },
            5 => Response::Refused {
                retry: body[1] == 1,
                reason: String::from_utf8_lossy(&body[2..]).into_owned(),
            },
            7 => Response::Ack {
                acked: number(&body[1..]),
                beyond: body[13..].chunks(8).map(number).collect(),
            },
            9 => Response::Done,
            kind => panic!("frame of kind {kind}"),
        }
    }

    fn frame(&mut self) -> Option<Vec<u8>> {
        let mut head = [0; 4];
        self.stream.read_exact(&mut head).ok()?;
        let mut body = vec![0; u32::from_be_bytes(head) as usize];
        self.stream.read_exact(&mut body).ok()?;
        Some(body)
    }
}
