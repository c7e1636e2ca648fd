"""A client of a Kubernetes API server, with objects as dicts and the server's error messages."""

import json
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any, cast
from urllib.parse import urlencode

Object = dict[str, Any]

PATCH = "application/strategic-merge-patch+json"


class Refused(Exception):  # noqa: N818
    """The API server refused a request. status: the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """url: of the server. authority: the file of the certificate that signed its own. token: of an administrator."""

    def __init__(self, url: str, authority: str, token: str) -> None:
        self.url = url
        self._context = ssl.create_default_context(cafile=authority)
        self._token = token
        self._resources: dict[tuple[str, str], str] = {}

    def call(self, method: str, path: str, body: Object | None = None, **query: str) -> Object:
        """One request. query: parameters such as dryRun.

        Raises:
            Refused: the server answered with an error.

        """
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = PATCH
        data = None if body is None else json.dumps(body).encode()
        address = f"{self.url}{path}?{urlencode(query)}"
        request = urllib.request.Request(address, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60, context=self._context) as response:
                return cast(Object, json.loads(response.read()))
        except urllib.error.HTTPError as error:
            text = error.read().decode()
            with suppress(ValueError, KeyError):
                text = str(json.loads(text)["message"])
            raise Refused(error.code, text) from None

    def get(self, path: str, **query: str) -> Object:
        return self.call("GET", path, None, **query)

    def items(self, path: str, **query: str) -> list[Object]:
        return cast(list[Object], self.get(path, **query)["items"])

    def exists(self, path: str) -> bool:
        try:
            self.get(path)
        except Refused as error:
            if error.status != 404:
                raise
            return False
        return True

    def collection(self, manifest: Object, namespace: str) -> str:
        """The path that objects of this kind are posted to.

        Raises:
            KeyError: the server has no such kind.

        """
        version, kind = manifest["apiVersion"], manifest["kind"]
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        if (version, kind) not in self._resources:
            for resource in self.get(root)["resources"]:
                if "/" not in resource["name"]:
                    inside = "namespaces/{}/" if resource["namespaced"] else ""
                    self._resources[version, resource["kind"]] = inside + resource["name"]
        return f"{root}/{self._resources[version, kind].format(manifest['metadata'].get('namespace', namespace))}"

    def try_out(self, manifest: Object, namespace: str) -> None:
        """Have the server validate and admit an object, unknown fields refused, and forget it.

        Raises:
            Refused: it would not take the object.

        """
        path = self.collection(manifest, namespace)
        self.call("POST", path, manifest, dryRun="All", fieldValidation="Strict")
