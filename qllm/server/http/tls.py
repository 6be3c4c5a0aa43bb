"""TLS: the server's certificate, and those of its clients."""

import ssl
from pathlib import Path

from qllm.errors import ConfigError
from qllm.server.config import ServerConfig

NEED_A_CERTIFICATE = ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")


def ssl_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the server; None for plain HTTP.

    Raises:
        ConfigError: A file is missing, or is no certificate or key.
    """
    if config.ssl_certfile is None:
        for name in NEED_A_CERTIFICATE:
            if getattr(config, name) is not None:
                raise ConfigError(f"{name} needs ssl_certfile, the server's own certificate")
        if config.ssl_cert_reqs != "none":
            raise ConfigError(f"ssl_cert_reqs={config.ssl_cert_reqs!r} needs ssl_certfile")
        return None
    if config.ssl_cert_reqs != "none" and config.ssl_ca_certs is None:
        raise ConfigError(
            f"ssl_cert_reqs={config.ssl_cert_reqs!r} needs ssl_ca_certs, to check certificates with"
        )
    secret = config.ssl_keyfile_password
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(
            config.ssl_certfile,
            config.ssl_keyfile,
            "" if secret is None else secret.get_secret_value(),  # None asks the terminal
        )
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except OSError as error:  # ssl.SSLError is one
        names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
        given = ", ".join(f"{name}={_text(getattr(config, name))}" for name in names)
        raise ConfigError(
            f"{given}: {error.strerror or error}; needed are PEM files of a certificate, its key "
            "and, to check clients, their authorities"
        ) from error
    context.verify_mode = ssl.VerifyMode[f"CERT_{config.ssl_cert_reqs.upper()}"]
    return context


def _text(path: Path | None) -> str:
    return "None" if path is None else repr(str(path))
