//! The peer protocol: cluster check, complete frames, concurrent calls, broken connections.

use moim_base::task::Shutdown;

use super::*;
use crate::rpc::Reply;
use crate::transport::{Service, ServiceError};

const CLUSTER: u128 = 0xC0FFEE;
const SECRET: u128 = 0x5EC2E7;
const PATIENCE: Duration = Duration::from_secs(20);

fn block_on<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await }).expect("it ends")
}

/// The listening voter.
const LISTENER: VoterId = VoterId(1);

fn local(cluster: u128, voter: VoterId) -> LocalPeer {
    LocalPeer::member(PeerId { cluster, voter, secret: SECRET })
}

/// A transport of voter 2.
fn caller(cluster: u128, scope: Scope) -> TcpTransport {
    TcpTransport::new(local(cluster, VoterId(2)), scope)
}

fn scope() -> Scope {
    Scope::new(Shutdown::new())
}

async fn listen(address: &str, scope: &Scope) -> Member {
    let address = address.parse().unwrap();
    let server = TcpServer::bind(address, local(CLUSTER, LISTENER), Router::new(), scope).await.unwrap();
    Member { id: LISTENER, address: server.address().to_string() }
}

/// A router without groups names the requested group: enough to distinguish replies.
async fn ask(transport: &TcpTransport, to: &Member, group: u64) -> Result<String, TransportError> {
    let reply = transport.call(to, GroupId(group), Bytes::from_static(b"?"), PATIENCE).await?;
    match Reply::decode(reply) {
        Ok(Reply::Failed(why)) => Ok(why),
        other => panic!("{other:?}"),
    }
}

#[test]
fn calls_of_many_groups_share_a_connection_and_get_their_own_replies() {
    block_on(async {
        let scope = scope();
        let peer = listen("127.0.0.1:0", &scope).await;
        let transport = caller(CLUSTER, scope);
        let calls = (0..500).map(|group| ask(&transport, &peer, group));
        for (group, reply) in futures_util::future::join_all(calls).await.into_iter().enumerate() {
            assert_eq!(reply.unwrap(), format!("group {group} is not here"));
        }
    });
}

#[test]
fn a_member_of_another_cluster_is_turned_away() {
    block_on(async {
        let scope = scope();
        let peer = listen("127.0.0.1:0", &scope).await;
        let stranger = caller(CLUSTER + 1, scope.clone());
        let refused = ask(&stranger, &peer, 1).await.unwrap_err();
        assert!(matches!(refused, TransportError::Unreachable(_)), "{refused}");
        assert!(ask(&caller(CLUSTER, scope), &peer, 1).await.is_ok());
    });
}

#[test]
fn a_voter_that_took_over_an_address_does_not_answer_for_the_old_one() {
    block_on(async {
        let scope = scope();
        let peer = listen("127.0.0.1:0", &scope).await;
        let transport = caller(CLUSTER, scope);
        let old = Member { id: VoterId(9), address: peer.address.clone() };
        let refused = ask(&transport, &old, 1).await.unwrap_err().to_string();
        assert!(refused.contains("voter 9 was meant, but voter 1 is there"), "{refused}");
        assert!(ask(&transport, &peer, 1).await.is_ok());
    });
}

#[test]
fn a_voter_that_moved_is_reached_where_it_is() {
    block_on(async {
        let scope = scope();
        let peer = listen("127.0.0.1:0", &scope).await;
        let transport = caller(CLUSTER, scope);
        let before = Member { id: LISTENER, address: "127.0.0.1:1".to_owned() };
        assert!(ask(&transport, &before, 1).await.is_err());
        transport.set_address(LISTENER, &peer.address);
        assert!(ask(&transport, &before, 1).await.is_ok());
    });
}

struct Echo;

impl crate::Service for Echo {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        Box::pin(async move { request })
    }
}

#[test]
fn visitors_reach_the_node_service_in_any_cluster_and_nothing_else() {
    block_on(async {
        let scope = scope();
        for local in [LocalPeer::unjoined(), local(CLUSTER, LISTENER)] {
            let router = Router::new();
            router.serve(ServiceId::NODE, Arc::new(Echo));
            router.serve(ServiceId::COORDINATOR, Arc::new(Echo));
            let address = "127.0.0.1:0".parse().unwrap();
            let server = TcpServer::bind(address, local, router, &scope).await.unwrap();
            let address = server.address().to_string();
            let answer = visit(&address, Bytes::from_static(b"hi"), PATIENCE).await;
            assert_eq!(answer, Ok(Bytes::from_static(b"hi")));

            let mut stream = TcpStream::connect(&address).await.unwrap();
            hello::greet_as_visitor(&mut stream).await.unwrap();
            let group = ServiceId::COORDINATOR.as_group();
            let frame = Frame { kind: REQUEST, call: 0, group, payload: Bytes::new() };
            write_frame(&mut stream, &frame).await.unwrap();
            assert!(read_frame(&mut stream, MAX_FRAME).await.is_err(), "it is closed without an answer");
        }
    });
}

#[test]
fn a_node_that_has_not_joined_neither_calls_nor_is_called_as_a_member() {
    block_on(async {
        let scope = scope();
        let address = "127.0.0.1:0".parse().unwrap();
        let server = TcpServer::bind(address, LocalPeer::unjoined(), Router::new(), &scope).await.unwrap();
        let empty = Member { id: LISTENER, address: server.address().to_string() };
        let refused = ask(&caller(CLUSTER, scope.clone()), &empty, 1).await.unwrap_err().to_string();
        assert!(refused.contains("it has not joined a cluster"), "{refused}");
        let peer = listen("127.0.0.1:0", &scope).await;
        let refused = ask(&TcpTransport::new(LocalPeer::unjoined(), scope), &peer, 1).await.unwrap_err();
        assert!(matches!(refused, TransportError::Unreachable(_)), "{refused}");
    });
}

/// The hello of voter 2.
fn hello() -> Hello {
    Hello::to_member(PeerId { cluster: CLUSTER, voter: VoterId(2), secret: SECRET }, LISTENER)
}

#[test]
fn garbage_ends_its_own_connection_only() {
    let mut damaged = [0; HEAD];
    damaged[0] = 1;
    let mut reply = vec![0; HEAD];
    reply[4] = REPLY;
    // Whether a hello and its proof go before.
    let cases = [
        (false, b"GET / HTTP/1.1\r\nHost: somewhere else entirely\r\n\r\n".to_vec()),
        (false, [&hello().encode()[..], &[0xFF; HEAD]].concat()),
        (false, [&hello().encode()[..], &[0xFF; 2 * hello::PROOF]].concat()),
        (true, vec![0xFF; HEAD]),
        (true, [&damaged[..], b"x"].concat()),
        (true, reply),
    ];
    block_on(async {
        let scope = scope();
        let peer = listen("127.0.0.1:0", &scope).await;
        let transport = caller(CLUSTER, scope);
        assert!(ask(&transport, &peer, 1).await.is_ok());
        for (case, (proved, bytes)) in cases.into_iter().enumerate() {
            let mut stream = TcpStream::connect(&peer.address).await.unwrap();
            if proved {
                hello::greet(&mut stream, hello(), SECRET).await.unwrap();
            }
            stream.write_all(&bytes).await.unwrap();
            let mut answer = Vec::new();
            // Closed or reset, but ended.
            let _ = stream.read_to_end(&mut answer).await;
            assert!(answer.len() <= hello::HELLO + hello::PROOF, "case {case}");
            assert!(ask(&transport, &peer, 1).await.is_ok(), "case {case}");
        }
    });
}

/// Counts what reaches it.
#[derive(Default)]
struct Count(AtomicU64);

impl Service for Count {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move { request })
    }
}

#[test]
fn dialler_without_the_cluster_secret_reaches_nothing() {
    block_on(async {
        let scope = scope();
        let (router, count) = (Router::new(), Arc::new(Count::default()));
        router.serve(ServiceId::COORDINATOR, count.clone());
        let streams = Arc::new(AtomicU64::new(0));
        let taken = Arc::clone(&streams);
        router.serve_streams(move |_| {
            taken.fetch_add(1, Ordering::Relaxed);
        });
        let address = "127.0.0.1:0".parse().unwrap();
        let server = TcpServer::bind(address, local(CLUSTER, LISTENER), router, &scope).await.unwrap();
        let address = server.address().to_string();
        let group = ServiceId::COORDINATOR.as_group();
        let frame = Frame { kind: REQUEST, call: 0, group, payload: Bytes::from_static(b"?") };
        // It knows everything that is public: the cluster, the voter it means, the voter it claims to be. It does not
        // care what the listener proves, and sends its request whatever the answer.
        for wrong in [SECRET + 1, 0] {
            for stream_wanted in [false, true] {
                let mut stream = TcpStream::connect(&address).await.unwrap();
                let id = PeerId { cluster: CLUSTER, voter: VoterId(2), secret: wrong };
                let ours = if stream_wanted {
                    Hello::to_stream(id, LISTENER)
                } else {
                    Hello::to_member(id, LISTENER)
                };
                let refused = hello::greet(&mut stream, ours, wrong).await.unwrap_err().to_string();
                assert!(refused.contains("does not prove"), "{refused}");
                let _ = stream.write_all(&[0; hello::PROOF]).await;
                let _ = write_frame(&mut stream, &frame).await;
                let mut rest = Vec::new();
                let _ = stream.read_to_end(&mut rest).await;
                assert!(rest.is_empty(), "{rest:?}");
            }
        }
        assert_eq!((count.0.load(Ordering::Relaxed), streams.load(Ordering::Relaxed)), (0, 0));
        let member = Member { id: LISTENER, address };
        let asked = caller(CLUSTER, scope);
        assert!(asked.ask(&member, ServiceId::COORDINATOR, Bytes::from_static(b"?"), PATIENCE).await.is_ok());
        assert_eq!(count.0.load(Ordering::Relaxed), 1);
    });
}

#[test]
fn thousands_of_partial_hellos_keep_out_neither_members_nor_visitors() {
    block_on(async {
        let scope = scope();
        let router = Router::new();
        router.serve(ServiceId::NODE, Arc::new(Echo));
        let address = "127.0.0.1:0".parse().unwrap();
        let server = TcpServer::bind(address, local(CLUSTER, LISTENER), router, &scope).await.unwrap();
        let peer = Member { id: LISTENER, address: server.address().to_string() };
        let open = caller(CLUSTER, scope.clone());
        assert!(ask(&open, &peer, 1).await.is_ok());
        let mut strangers = Vec::new();
        for number in 0..1_500 {
            let mut stream = TcpStream::connect(&peer.address).await.unwrap();
            let bytes = hello().encode();
            stream.write_all(&bytes[..number % hello::HELLO]).await.unwrap();
            strangers.push(stream);
        }
        // The connection that was open, a new one, and a visitor, while they hold theirs.
        assert!(ask(&open, &peer, 1).await.is_ok());
        assert!(ask(&caller(CLUSTER, scope), &peer, 1).await.is_ok());
        let answer = visit(&peer.address, Bytes::from_static(b"hi"), PATIENCE).await;
        assert_eq!(answer, Ok(Bytes::from_static(b"hi")));
        // All of them are closed, the last ones when their time is over.
        for mut stream in strangers {
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    });
}

#[test]
fn a_call_on_a_broken_connection_fails_and_the_next_connects_anew() {
    block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = Member { id: LISTENER, address: listener.local_addr().unwrap().to_string() };
        let transport = caller(CLUSTER, scope());
        let breaks = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            hello::welcome(&mut stream, |_| (local(CLUSTER, LISTENER).id(), ())).await.unwrap();
            read_frame(&mut stream, MAX_FRAME).await.unwrap();
        };
        let (broken, ()) = tokio::join!(ask(&transport, &peer, 1), breaks);
        assert!(matches!(broken, Err(TransportError::Broken(_))), "{broken:?}");
        drop(listener);
        let refused = ask(&transport, &peer, 1).await;
        assert!(matches!(refused, Err(TransportError::Unreachable(_))), "{refused:?}");
        let servers = scope();
        listen(&peer.address, &servers).await;
        assert!(ask(&transport, &peer, 1).await.is_ok());
    });
}

#[test]
fn a_peer_that_stays_silent_is_given_up() {
    block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let peer = Member { id: LISTENER, address: listener.local_addr().unwrap().to_string() };
        let transport = caller(CLUSTER, scope());
        let silent = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            hello::welcome(&mut stream, |_| (local(CLUSTER, LISTENER).id(), ())).await.unwrap();
            let mut rest = Vec::new();
            let _ = stream.read_to_end(&mut rest).await;
        };
        let calls = async {
            for _ in 0..GIVE_UP {
                let call = transport.call(&peer, GroupId(1), Bytes::new(), Duration::from_millis(20));
                assert_eq!(call.await, Err(TransportError::TimedOut));
            }
        };
        // The silent side sees its connection end.
        tokio::join!(silent, calls);
    });
}

/// Answers the request backwards; holds back what begins with `h` until it is let go.
struct Backwards(Semaphore);

impl Service for Backwards {
    fn handle(&self, request: Bytes) -> BoxFuture<'_, Bytes> {
        Box::pin(async move {
            if request.first() == Some(&b'h') {
                let _let_go = self.0.acquire().await.expect("it is never closed");
            }
            request.iter().rev().copied().collect()
        })
    }
}

#[test]
fn services_answer_beside_the_groups_and_never_hold_them_up() {
    block_on(async {
        let scope = scope();
        let router = Router::new();
        let address = "127.0.0.1:0".parse().unwrap();
        let server =
            TcpServer::bind(address, local(CLUSTER, LISTENER), router.clone(), &scope).await.unwrap();
        let peer = Member { id: LISTENER, address: server.address().to_string() };
        let transport = caller(CLUSTER, scope);
        let service = ServiceId(7);
        let asked =
            |text: &'static str| transport.ask(&peer, service, Bytes::from_static(text.as_bytes()), PATIENCE);
        assert_eq!(asked("abc").await.unwrap_err(), ServiceError::NotHere);
        let backwards = Arc::new(Backwards(Semaphore::new(0)));
        router.serve(service, backwards.clone());
        assert_eq!(asked("abc").await.unwrap(), "cba");

        let mut held: Vec<_> = (0..CALLS).map(|_| asked("held")).collect();
        let group = async {
            // Behind every held request on the same connection.
            assert_eq!(ask(&transport, &peer, 3).await.unwrap(), "group 3 is not here");
            backwards.0.add_permits(1);
        };
        let (answers, ()) = tokio::join!(futures_util::future::join_all(held.drain(..)), group);
        assert!(answers.into_iter().all(|answer| answer.unwrap() == "dleh"));
        router.unserve(service);
        assert_eq!(asked("abc").await.unwrap_err(), ServiceError::NotHere);
    });
}

#[test]
fn member_gets_a_raw_stream_where_streams_are_served() {
    block_on(async {
        let scope = scope();
        let router = Router::new();
        let server =
            TcpServer::bind("127.0.0.1:0".parse().unwrap(), local(CLUSTER, LISTENER), router.clone(), &scope);
        let address = server.await.unwrap().address().to_string();
        let peer = Member { id: LISTENER, address };
        let mut refused = open_stream(&local(CLUSTER, VoterId(2)), &peer).await.unwrap();
        assert_eq!(refused.read(&mut [0]).await.unwrap(), 0, "no stream handler yet");
        let (sender, mut taken) = mpsc::channel(1);
        router.serve_streams(move |stream| sender.try_send(stream).unwrap());
        let mut ours = open_stream(&local(CLUSTER, VoterId(2)), &peer).await.unwrap();
        let mut theirs = TcpStream::from_std(taken.recv().await.unwrap()).unwrap();
        ours.write_all(b"ping").await.unwrap();
        let mut bytes = [0; 4];
        theirs.read_exact(&mut bytes).await.unwrap();
        assert_eq!(&bytes, b"ping");
        let stranger = open_stream(&local(CLUSTER + 1, VoterId(2)), &peer).await;
        assert!(stranger.is_err());
    });
}
