//! The control socket between `moim dev stop|restart|kill|status` and the supervisor: one JSON line per request and
//! response.
//!
//! The socket is in the data directory: the permission to write there is the permission to send requests. Its path can be
//! longer than a socket address may be; both ends use `/proc/self/fd` to avoid that limit.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};

use super::roster::Listing;
use super::up::{lock, nodes_table};
use crate::exit::{Failure, Outcome, Status};
use crate::output::{Output, Report, Section, note};

const SOCKET: &str = "dev.sock";
/// The longest line either side reads.
const MAX_LINE: u64 = 1 << 20;

/// A request to the supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "lowercase")]
pub(super) enum Request {
    /// Stop this node, or everything.
    Stop { node: Option<i32> },
    /// Start this node again.
    Restart {
        node: i32,
        /// With an empty folder, as a new node.
        #[serde(default)]
        fresh: bool,
        patience_ms: u64,
    },
    /// kill -9.
    Kill { node: i32 },
    /// List the nodes.
    Status,
}

/// The response of the supervisor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Response {
    /// The request was executed.
    Done { message: String },
    /// The request failed.
    Failed { status: u8, message: String, hint: Option<String> },
    /// The nodes.
    Nodes(Listing),
}

impl From<Failure> for Response {
    fn from(failure: Failure) -> Self {
        Self::Failed { status: failure.status as u8, message: failure.message, hint: failure.hint }
    }
}

/// The listener of the supervisor.
pub(super) struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// Listens in this directory. The caller holds its lock, so an existing socket is a leftover.
    pub(super) fn bind(data: &Path) -> io::Result<Self> {
        let path = data.join(SOCKET);
        if let Err(error) = std::fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            return Err(error);
        }
        let folder = File::open(data)?;
        let listener = UnixListener::bind(short(&folder))?;
        Ok(Self { listener, path })
    }

    /// Accepts the next connection. Cancel-safe.
    pub(super) async fn accept(&self) -> io::Result<Asked> {
        let (stream, _) = self.listener.accept().await?;
        Ok(Asked { stream: BufReader::new(stream) })
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A connection of a command.
pub(super) struct Asked {
    stream: BufReader<UnixStream>,
}

impl Asked {
    /// Reads the request.
    pub(super) async fn request(&mut self) -> io::Result<Request> {
        Ok(serde_json::from_str(&read_line(&mut self.stream).await?)?)
    }

    /// Sends the response. A client that has disconnected does not get it.
    pub(super) async fn answer(mut self, response: &Response) {
        let _ = write_line(self.stream.get_mut(), response).await;
    }
}

pub(super) async fn stop(data: &Path, node: Option<i32>, patience: Duration, output: Output) -> Outcome {
    match node {
        Some(_) => ask(data, Request::Stop { node }, patience).await?.print(output),
        None => {
            stop_all(data, patience).await?;
            Response::Done { message: "every node is stopped".to_owned() }.print(output)
        }
    }
}

/// Ends the supervisor and with it every node. Returns when no process is left.
pub(super) async fn stop_all(data: &Path, patience: Duration) -> Outcome {
    let mut stream = connect(data).await.map_err(|error| unreachable(data, &error))?;
    write_line(stream.get_mut(), &Request::Stop { node: None }).await?;
    let ended = async {
        // There is no response: the stream ends with the process.
        let _ = read_line(&mut stream).await;
        while lock(data).is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(patience, ended)
        .await
        .map_err(|_| Failure::new(Status::Timeout, "the nodes did not stop in time"))
}

pub(super) async fn restart(
    data: &Path,
    node: i32,
    fresh: bool,
    patience: Duration,
    output: Output,
) -> Outcome {
    let patience_ms = u64::try_from(patience.as_millis()).unwrap_or(u64::MAX);
    ask(data, Request::Restart { node, fresh, patience_ms }, patience).await?.print(output)
}

pub(super) async fn kill(data: &Path, node: i32, patience: Duration, output: Output) -> Outcome {
    ask(data, Request::Kill { node }, patience).await?.print(output)
}

pub(super) async fn status(data: &Path, patience: Duration, output: Output) -> Outcome {
    ask(data, Request::Status, patience).await?.print(output)
}

/// Sends a request to the supervisor of this directory.
pub(super) async fn ask(data: &Path, request: Request, patience: Duration) -> Outcome<Response> {
    let mut stream = connect(data).await.map_err(|error| unreachable(data, &error))?;
    let asking = async {
        write_line(stream.get_mut(), &request).await?;
        read_line(&mut stream).await
    };
    // The supervisor has the same timeout and reports what is missing; it gets a little more time to respond.
    let line = match tokio::time::timeout(patience.saturating_add(Duration::from_secs(15)), asking).await {
        Ok(line) => {
            line.map_err(|error| Failure::error(format!("the supervisor does not answer: {error}")))?
        }
        Err(_) => return Err(Failure::new(Status::Timeout, "the supervisor does not answer in time")),
    };
    match serde_json::from_str(&line)? {
        Response::Failed { status, message, hint } => {
            let mut failure = Failure::new(Status::from_number(status), message);
            failure.hint = hint;
            Err(failure)
        }
        response => Ok(response),
    }
}

fn unreachable(data: &Path, error: &io::Error) -> Failure {
    let why = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => String::new(),
        _ => format!(": {error}"),
    };
    Failure::new(Status::Unreachable, format!("no cluster runs in {}{why}", data.display()))
        .hint("start one with `moim dev`, or name its folder with --data")
}

async fn connect(data: &Path) -> io::Result<BufReader<UnixStream>> {
    let folder = File::open(data)?;
    Ok(BufReader::new(UnixStream::connect(short(&folder)).await?))
}

/// The path of the socket through the open directory: always short enough.
fn short(folder: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", folder.as_raw_fd()))
}

async fn read_line(stream: &mut BufReader<UnixStream>) -> io::Result<String> {
    let mut line = String::new();
    stream.take(MAX_LINE).read_line(&mut line).await?;
    if line.ends_with('\n') { Ok(line) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

async fn write_line(stream: &mut UnixStream, value: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    stream.write_all(&line).await
}

impl Response {
    fn print(&self, output: Output) -> Outcome {
        match self {
            Self::Done { message } if output.format == crate::output::Format::Table => {
                note(message);
                Ok(())
            }
            Self::Done { message } => output.print(&Done { message }),
            Self::Nodes(listing) => output.print(listing),
            Self::Failed { .. } => Ok(()),
        }
    }
}

#[derive(Serialize)]
struct Done<'a> {
    message: &'a str,
}

impl Report for Done<'_> {
    fn sections(&self) -> Vec<Section> {
        vec![]
    }
}

impl Report for Listing {
    fn sections(&self) -> Vec<Section> {
        vec![nodes_table(&self.nodes)]
    }
}
