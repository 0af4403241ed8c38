"""Key pairs and certificates: a run's own authority, and what it signs. Keys are on the curve P-256."""

from __future__ import annotations

import hashlib
import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco.errors import SettingsError

AUTHORITY_DAYS = 3650
CLOCKS = timedelta(days=1)  # a peer's clock may be behind by so much: a wrong time zone is, too

Purpose = x509.ObjectIdentifier


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, as PEM."""

    certificate: str
    private_key: str
    serial: str  # in hex
    expires: datetime


class Authority:
    """A run's authority, which signs its certificates."""

    def __init__(self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        self._certificate, self._key = certificate, key

    @classmethod
    def new(cls, run: str) -> Authority:
        """Make an authority for one run."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name(f"diloco {run}", run, "authority")
        now = datetime.now(UTC)
        usage = x509.KeyUsage(
            digital_signature=False,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = (
            _builder(name, name, key.public_key(), now - CLOCKS, now + timedelta(days=AUTHORITY_DAYS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    @classmethod
    def of(cls, certificate: bytes, key: bytes) -> Authority:
        """Load an authority that was made before, from PEM.

        Raises:
            ValueError: they are damaged, or do not belong together.
        """
        loaded = x509.load_pem_x509_certificate(certificate)
        private = serialization.load_pem_private_key(key, None)
        if not isinstance(private, ec.EllipticCurvePrivateKey) or private.public_key() != loaded.public_key():
            raise ValueError("the key is not the certificate's")
        return cls(loaded, private)

    @property
    def certificate(self) -> str:
        """As PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def private_key(self) -> str:
        """As PEM."""
        return _pem(self._key)

    def client(self, name: str, run: str, role: str, expires: datetime) -> Issued:
        """Issue a certificate for a process: it says its name, run and role."""
        return self._issue(_name(name, run, role), expires, [ExtendedKeyUsageOID.CLIENT_AUTH], [])

    def server(self, name: str, run: str, hosts: list[str], expires: datetime) -> Issued:
        """Issue a certificate for a server under these names and addresses, good for routes between servers too."""
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._issue(_name(name, run, "server"), expires, purposes, [_host(host) for host in hosts])

    def _issue(self, subject: x509.Name, expires: datetime, purposes: list[Purpose], hosts: list[x509.GeneralName]) -> Issued:
        key = ec.generate_private_key(ec.SECP256R1())
        expires = min(expires, self._certificate.not_valid_after_utc)
        begins = min(datetime.now(UTC) - CLOCKS, expires - CLOCKS)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = (
            _builder(subject, self._certificate.subject, key.public_key(), begins, expires)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        pem = signed.public_bytes(serialization.Encoding.PEM).decode()
        return Issued(pem, _pem(key), f"{signed.serial_number:x}", signed.not_valid_after_utc)


def pin(certificate: bytes) -> str:
    """Return the SHA-256 of the public key of a certificate in PEM, in hex: as nats-server's ``pinned_certs`` has it.

    Raises:
        ValueError: it is damaged.
    """
    key = x509.load_pem_x509_certificate(certificate).public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def for_browser(certificate: str, private_key: str, name: str, password: bytes) -> bytes:
    """Return a certificate and its key, both PEM, as a browser takes them: PKCS #12 under a password.

    Raises:
        ValueError: they are damaged.
    """
    key = serialization.load_pem_private_key(private_key.encode(), None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is of another kind")
    loaded = x509.load_pem_x509_certificate(certificate.encode())
    form = serialization.BestAvailableEncryption(password)
    return pkcs12.serialize_key_and_certificates(name.encode(), key, loaded, None, form)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begins: datetime, expires: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(expires)
    )


def _name(common: str, run: str, unit: str) -> x509.Name:
    parts = ((NameOID.COMMON_NAME, common), (NameOID.ORGANIZATION_NAME, run), (NameOID.ORGANIZATIONAL_UNIT_NAME, unit))
    return x509.Name([x509.NameAttribute(oid, text) for oid, text in parts])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise SettingsError(f"--host {host!r}: neither a host's name nor an address") from None


def _pem(key: ec.EllipticCurvePrivateKey) -> str:
    """Return a key unencrypted: the file's permissions protect it."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()
