//! Optional TLS between clients and gateways: the gateway presents a certificate, the client trusts one authority.
//! Client authentication remains the shared secret ([`crate::identity`]).
//!
//! The cryptography is graviola's: Rust and assembler, no C or C++ compiler needed.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Why TLS cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A PEM file cannot be read or parsed.
    #[error("{0}: {1}")]
    File(PathBuf, rustls::pki_types::pem::Error),
    /// A PEM file without a certificate.
    #[error("{0}: there is no certificate in it")]
    Empty(PathBuf),
    /// A certificate without a key, or a key without a certificate.
    #[error("tls_cert_file and tls_key_file belong together")]
    Half,
    /// An invalid host name.
    #[error("`{0}` is not a name that a certificate can have")]
    Name(String),
    /// Certificate and key do not match, or are not supported.
    #[error("certificate and key cannot be used: {0}")]
    Unusable(#[from] rustls::Error),
}

/// TLS of a gateway.
#[derive(Clone)]
pub struct ServerTls(TlsAcceptor);

/// TLS of a client.
#[derive(Clone)]
pub struct ClientTls {
    connector: TlsConnector,
    /// The name that the certificate must be valid for; none for the connected address.
    name: Option<ServerName<'static>>,
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServerTls")
    }
}

impl std::fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientTls").field("name", &self.name).finish_non_exhaustive()
    }
}

impl ServerTls {
    /// Loads a certificate chain and a private key, both PEM.
    pub fn load(certificates: &Path, key: &Path) -> Result<Self, TlsError> {
        let chain = read_certificates(certificates)?;
        let key = PrivateKeyDer::from_pem_file(key).map_err(|error| TlsError::File(key.to_owned(), error))?;
        let config = ServerConfig::builder_with_provider(Arc::new(rustls_graviola::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }

    pub(crate) async fn accept(&self, stream: TcpStream) -> io::Result<Socket> {
        Ok(Socket::Tls(Box::new(self.0.accept(stream).await?.into())))
    }
}

impl ClientTls {
    /// Trusts certificates signed by the authorities in this file, for `name` or for the connected address.
    pub fn load(authorities: &Path, name: Option<&str>) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in read_certificates(authorities)? {
            roots.add(certificate)?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(rustls_graviola::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = name
            .map(|name| ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name(name.to_owned())))
            .transpose()?;
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name })
    }

    pub(crate) async fn connect(&self, to: SocketAddr, stream: TcpStream) -> io::Result<Socket> {
        let name = self.name.clone().unwrap_or_else(|| ServerName::from(to.ip()));
        Ok(Socket::Tls(Box::new(self.connector.connect(name, stream).await?.into())))
    }
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let wrong = |error| TlsError::File(path.to_owned(), error);
    let all: Vec<_> =
        CertificateDer::pem_file_iter(path).map_err(wrong)?.collect::<Result<_, _>>().map_err(wrong)?;
    if all.is_empty() { Err(TlsError::Empty(path.to_owned())) } else { Ok(all) }
}

/// A connection, with or without TLS.
pub(crate) enum Socket {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::TlsStream<TcpStream>>),
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
