"""A certificate authority for tests."""

import subprocess


def openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


class Authority:
    """A certificate authority for tests; its certificates are files in a directory."""

    def __init__(self, where):
        self.where, self.file = where, where / "ca.pem"
        self._made("ca", "-x509", "-addext", "basicConstraints=critical,CA:TRUE")

    def give(self, name, to="localhost", days=2):
        """Create a certificate for the host `to`, valid for `days`, and its key; return the paths of the two files."""
        signed = ("-CA", self.file, "-CAkey", self.where / "ca.key", "-addext", "subjectAltName=DNS:" + to)
        self._made(name, "-x509", *signed, days=days)
        return self.where / f"{name}.pem", self.where / f"{name}.key"

    def _made(self, name, *how, days=2):
        ec = (
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-days",
            days,
            "-subj",
            f"/CN={name}",
        )
        openssl("req", *ec, *how, "-keyout", self.where / f"{name}.key", "-out", self.where / f"{name}.pem")
