"""The keys and certificates of one cluster: a certificate authority and what it signs.

EC keys (P-256), because making one takes a millisecond where RSA takes a tenth of a second.
"""

import dataclasses
import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_VALID = datetime.timedelta(days=365)
_SKEW = datetime.timedelta(minutes=5)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whom a certificate names.

    Attributes:
        file: name of the files, without ``.crt`` and ``.key``.
        common_name: the user, as Kubernetes reads client certificates.
        organization: the user's group; empty for none.
        hosts: names and addresses a server answers to; empty for a client.
    """

    file: str
    common_name: str
    organization: str = ""
    hosts: tuple[str, ...] = ()


def write_certificates(folder: Path, identities: tuple[Identity, ...]) -> None:
    """Write ``ca.crt``, ``ca.key``, a pair for each identity, and ``service-accounts.key`` / ``.pub``."""
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority_name = _name("ballast-local-cluster")
    authority = (
        _builder(authority_name, authority_name, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    _write_pair(folder / "ca", authority_key, authority)
    for identity in identities:
        add_certificate(folder, identity)
    service_accounts = ec.generate_private_key(ec.SECP256R1())
    _write_key(folder / "service-accounts.key", service_accounts)
    (folder / "service-accounts.pub").write_bytes(
        service_accounts.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


def add_certificate(folder: Path, identity: Identity) -> None:
    """Write a pair that the authority in ``folder`` signs."""
    authority_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _builder(_name(identity.common_name, identity.organization), authority.subject, key.public_key())
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
        )
    )
    if identity.hosts:
        names = [_general_name(host) for host in identity.hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    _write_pair(folder / identity.file, key, builder.sign(authority_key, hashes.SHA256()))


def _name(common_name: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write_pair(path: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    _write_key(path.with_name(path.name + ".key"), key)
    path.with_name(path.name + ".crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            # SEC1 ("EC PRIVATE KEY"): the form every Kubernetes component reads for service-account keys.
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
    )
