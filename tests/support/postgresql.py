"""A PostgreSQL of the tests' own, where its programs are installed."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from ballast_localcluster.certificates import Identity, write_certificates

from tests.support.ports import free_port
from tests.support.waiting import eventually


class PostgreSQL:
    """A server on a port of its own, whose users all have a password that an address has to quote.

    Attributes:
        port: where it listens, on 127.0.0.1, with TLS, too.
        authority: file with the certificate that signed the server's.
    """

    PASSWORD = "s3cret/@%"

    def __init__(self, folder: Path) -> None:
        found = [shutil.which("initdb"), *sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")))]
        if not any(found):
            pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
        self._folder, self._programs = folder, Path(next(filter(None, found))).resolve().parent
        self.port = free_port()
        # As root it does not run.
        self._user = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
        self._server: subprocess.Popen[bytes] | None = None
        write_certificates(folder, (Identity(file="server", common_name="server", hosts=("127.0.0.1",)),))
        self.authority = folder / "ca.crt"
        for path in (folder, folder / "server.key") if os.geteuid() == 0 else ():
            shutil.chown(path, "nobody")
        password = folder / "password"
        password.write_text(self.PASSWORD)
        password.chmod(0o644)
        self._data = folder / "data"
        settings = {"pgdata": self._data, "username": "admin", "pwfile": password, "auth": "scram-sha-256"}
        words = [
            f"--{name}={value}" for name, value in {**settings, "encoding": "UTF8", "locale": "C"}.items()
        ]
        made = self._run("initdb", "--no-sync", *words).wait()
        assert made == 0, (folder / "initdb.log").read_text()

    def _run(self, program: str, *words: str) -> "subprocess.Popen[bytes]":
        with (self._folder / f"{program}.log").open("ab") as log:
            return subprocess.Popen(
                [self._programs / program, *words],
                user=self._user if os.geteuid() == 0 else None,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )

    def start(self) -> None:
        """Begin, and wait until it answers."""
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "ssl": "on",
            "ssl_cert_file": self._folder / "server.crt",
            "ssl_key_file": self._folder / "server.key",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self._server = self._run("postgres", "-D", str(self._data), *words)
        eventually(self._answers)

    def stop(self) -> None:
        """End at once, as a server does that is taken away."""
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)  # its children end with it
            self._server.wait()
            self._server = None

    def _answers(self) -> bool:
        return self._run("pg_isready", "-h", "127.0.0.1", "-p", str(self.port)).wait() == 0

    def run(self, *statements: str, database: str = "postgres") -> None:
        """As administrator, each by itself."""
        engine = sa.create_engine(self._url(database), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(sa.text(statement))

    def address(self, database: str, user: str = "admin") -> str:
        """Of a database, as a Secret has it."""
        url = self._url(database).set(drivername="postgresql", username=user)
        return url.render_as_string(hide_password=False)

    def _url(self, database: str) -> sa.URL:
        return sa.URL.create(
            "postgresql+pg8000", "admin", self.PASSWORD, host="127.0.0.1", port=self.port, database=database
        )


@contextlib.contextmanager
def a_postgresql() -> Iterator[PostgreSQL]:
    """A server that runs."""
    with tempfile.TemporaryDirectory() as name:
        server = PostgreSQL(Path(name))
        server.start()
        try:
            yield server
        finally:
            server.stop()
