"""Key pairs and certificates: a run's own authority, and what it signs. Keys are on the curve P-256."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import pkcs12
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diloco.errors import SettingsError

AUTHORITY_DAYS = 3650
CLOCKS = timedelta(days=1)  # a peer's clock may be behind by so much: a wrong time zone is, too
SALT_BYTES = 16
STRETCH = "scrypt-131072-8-1"  # how a passphrase becomes a key: the first word of a protected file

Key = ec.EllipticCurvePrivateKey
Purpose = x509.ObjectIdentifier


@dataclass(frozen=True)
class Issued:
    """A certificate, as PEM."""

    certificate: str
    serial: str  # in hex
    expires: datetime


class Authority:
    """A run's authority, which signs its certificates."""

    def __init__(self, certificate: x509.Certificate, key: Callable[[], Key]) -> None:
        """``key``: asked for when the first certificate is signed, since it may be under a passphrase."""
        self._certificate, self._unlock = certificate, key

    @classmethod
    def new(cls, run: str, key: Key) -> Authority:
        """Make an authority for one run."""
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
        return cls(builder.sign(key, hashes.SHA256()), lambda: key)

    @classmethod
    def of(cls, certificate: bytes, key: bytes, passphrase: Callable[[], bytes]) -> Authority:
        """Load an authority that was made before, from PEM. A key under a passphrase is opened when it is needed.

        Raises:
            ValueError: they are damaged, or do not belong together.
        """
        loaded = x509.load_pem_x509_certificate(certificate)
        if is_protected(key):
            made = cls(loaded, lambda: _of_certificate(loaded, unlocked(key, passphrase())))
        else:
            private = _of_certificate(loaded, _loaded(key, None))
            made = cls(loaded, lambda: private)
        return made

    @property
    def certificate(self) -> str:
        """As PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def expires(self) -> datetime:
        """When its certificate ends, and with it all that it signed."""
        return self._certificate.not_valid_after_utc

    def check_good(self) -> None:
        """Refuse to sign when the authority's certificate has ended.

        Raises:
            SettingsError: it has.
        """
        if self.expires <= datetime.now(UTC):
            raise SettingsError(
                f"the run's authority (ca.pem) ended on {self.expires:%Y-%m-%d}, by this machine's clock, so everything "
                "that it signs is refused: make a new folder (diloco keys init), and distribute its files again"
            )

    @cached_property
    def _key(self) -> Key:
        return self._unlock()

    def client(self, name: str, run: str, role: str, expires: datetime, key: ec.EllipticCurvePublicKey) -> Issued:
        """Issue a certificate for a process: it says its name, run and role."""
        return self._issue(_name(name, run, role), expires, key, [ExtendedKeyUsageOID.CLIENT_AUTH], [])

    def server(self, name: str, run: str, hosts: list[str], expires: datetime, key: ec.EllipticCurvePublicKey) -> Issued:
        """Issue a certificate for a server under these names and addresses, good for routes between servers too."""
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._issue(_name(name, run, "server"), expires, key, purposes, [_host(host) for host in hosts])

    def _issue(
        self,
        subject: x509.Name,
        expires: datetime,
        key: ec.EllipticCurvePublicKey,
        purposes: list[Purpose],
        hosts: list[x509.GeneralName],
    ) -> Issued:
        self.check_good()
        expires = min(expires, self.expires)
        begins = min(datetime.now(UTC) - CLOCKS, expires - CLOCKS)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = (
            _builder(subject, self._certificate.subject, key, begins, expires)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        pem = signed.public_bytes(serialization.Encoding.PEM).decode()
        return Issued(pem, f"{signed.serial_number:x}", signed.not_valid_after_utc)


# ---- private keys


def new_key() -> Key:
    """Make a private key."""
    return ec.generate_private_key(ec.SECP256R1())


def plain_text(key: Key) -> str:
    """Return a private key as PEM, unencrypted: the file's permissions protect it."""
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()).decode()


def protected_text(key: Key, passphrase: bytes) -> str:
    """Return a private key under a passphrase: a line with the salt, and PEM under what scrypt makes of both.

    PEM's own stretching of a passphrase is too quick to withstand guesses.
    """
    salt = os.urandom(SALT_BYTES)
    locked = serialization.BestAvailableEncryption(_stretched(passphrase, salt))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked).decode()
    return f"{STRETCH} {salt.hex()}\n{pem}"


def is_protected(text: bytes) -> bool:
    """Whether a private key's text is under a passphrase."""
    return text.startswith(STRETCH.encode())


def unlocked(text: bytes, passphrase: bytes) -> Key:
    """Return the private key of :func:`protected_text`.

    Raises:
        SettingsError: the passphrase is another one, or the text is damaged.
    """
    head, _, pem = text.partition(b"\n")
    try:
        salt = bytes.fromhex(head.removeprefix(STRETCH.encode()).strip().decode())
        return _loaded(pem, _stretched(passphrase, salt))
    except ValueError:
        raise SettingsError("ca.key: the passphrase is wrong, or the file is damaged") from None


def _stretched(passphrase: bytes, salt: bytes) -> bytes:
    return hashlib.scrypt(passphrase, salt=salt, n=1 << 17, r=8, p=1, maxmem=1 << 28, dklen=32).hex().encode()


def _loaded(pem: bytes, password: bytes | None) -> Key:
    try:
        key = serialization.load_pem_private_key(pem, password)
    except TypeError:  # a password without encryption, or the reverse
        raise ValueError("the key is encrypted in a way that diloco keys does not write") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is of another kind")
    return key


def private_key(pem: str) -> Key:
    """Return a private key of :func:`plain_text`.

    Raises:
        ValueError: it is damaged.
    """
    return _loaded(pem.encode(), None)


def _of_certificate(certificate: x509.Certificate, key: Key) -> Key:
    if key.public_key() != certificate.public_key():
        raise ValueError("the key is not the certificate's")
    return key


# ---- requests for certificates


def certificate_request(name: str, key: Key) -> str:
    """Return a request for a certificate of ``key``, as PEM; its signature proves that the asker has the key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signed = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    return signed.public_bytes(serialization.Encoding.PEM).decode()


def requested_key(request: str) -> ec.EllipticCurvePublicKey:
    """Return the public key of a request in PEM. Of all else that it says nothing counts.

    Raises:
        ValueError: it is damaged, of another curve, or not signed by its key.
    """
    loaded = x509.load_pem_x509_csr(request.encode())
    key = loaded.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("its key is not on the curve P-256")
    if not loaded.is_signature_valid:
        raise ValueError("it is not signed by its own key")
    return key


def belongs(certificate: str, key: Key) -> bool:
    """Whether a certificate in PEM is one of a private key.

    Raises:
        ValueError: the certificate is damaged.
    """
    return x509.load_pem_x509_certificate(certificate.encode()).public_key() == key.public_key()


def pin(certificate: bytes) -> str:
    """Return the SHA-256 of the public key of a certificate in PEM, in hex: as nats-server's ``pinned_certs`` has it.

    Raises:
        ValueError: it is damaged.
    """
    key = x509.load_pem_x509_certificate(certificate).public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(key.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def for_browser(certificate: str, private_pem: str, name: str, password: bytes) -> bytes:
    """Return a certificate and its key, both PEM, as a browser takes them: PKCS #12 under a password.

    Raises:
        ValueError: they are damaged.
    """
    key = _loaded(private_pem.encode(), None)
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
