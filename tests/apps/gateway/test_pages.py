"""The pages' files: all there, all local, nothing inline, under a policy that lets nothing else in."""

import gzip
import re
from html.parser import HTMLParser
from pathlib import PurePosixPath

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from corolla.apps.gateway.pages import PAGES, page_routes, read_files

FILES = {name: file.plain.decode() for name, file in read_files().items()}
OWN_SCRIPTS = [name for name in FILES if name.endswith(".js") and not name.startswith("vendor/")]
PATHS = [*PAGES, *(f"/assets/{name}" for name in FILES if not name.endswith(".html"))]


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(Starlette(routes=page_routes()))


class Elements(HTMLParser):
    """Every start tag with its attributes, and the ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))


@pytest.mark.parametrize("path", PATHS)
def test_every_file_comes_under_the_policy(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_a_browser_that_has_a_file_does_not_get_it_again(client: TestClient) -> None:
    first = client.get("/")
    again = client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_files_are_packed_for_browsers_that_unpack() -> None:
    for name, file in read_files().items():
        assert gzip.decompress(file.zipped) == file.plain, name


@pytest.mark.parametrize("page", PAGES.values())
def test_a_page_has_no_script_style_or_handler_in_its_markup(page: str) -> None:
    for tag, attributes in Elements(FILES[page]).all:
        assert tag != "style"
        assert tag != "script" or attributes.get("src")
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


@pytest.mark.parametrize("page", PAGES.values())
def test_all_that_a_page_names_is_served_here(page: str) -> None:
    for _, attributes in Elements(FILES[page]).all:
        target = attributes.get("src") or attributes.get("href") or "./"
        if target.startswith("assets/"):
            assert target.removeprefix("assets/") in FILES
        else:
            assert target.startswith("#") or f"/{target}".replace("/./", "/") in PAGES, target


@pytest.mark.parametrize("script", OWN_SCRIPTS)
def test_scripts_import_what_is_there_and_name_no_other_site(script: str) -> None:
    for imported in re.findall(r'from "(\./[^"]+)"', FILES[script]):
        assert str(PurePosixPath(imported)) in FILES, imported
    assert "://" not in FILES[script]


@pytest.mark.parametrize("script", OWN_SCRIPTS)
def test_scripts_make_no_markup_out_of_text(script: str) -> None:
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|srcdoc", FILES[script])


def test_only_markdown_is_turned_into_elements_and_only_sanitised() -> None:
    users = [name for name in OWN_SCRIPTS if "vendor/" in FILES[name]]
    assert users == ["markdown.js"]
    assert FILES["markdown.js"].count("markdown.parser(") == FILES["markdown.js"].count(
        "DOMPurify.sanitize(markdown.parser("
    )


@pytest.mark.parametrize("page", PAGES.values())
def test_ids_that_a_page_and_its_scripts_use_are_in_it(page: str) -> None:
    elements = Elements(FILES[page]).all
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    [entry] = [str(attributes["src"]) for tag, attributes in elements if tag == "script"]
    used = set(
        re.findall(r'byId\("([^"]+)"\)', "".join(FILES[name] for name in reachable(entry.removeprefix("assets/"))))
    )
    assert used <= set(ids)
    for _, attributes in elements:
        assert attributes.get("for") is None or attributes["for"] in ids


def reachable(script: str) -> set[str]:
    """The script and all that it imports, of ours."""
    found, to_read = set[str](), [script]
    while to_read:
        name = to_read.pop()
        if name not in found and name in OWN_SCRIPTS:
            found.add(name)
            to_read += [str(PurePosixPath(path)) for path in re.findall(r'from "(\./[^"]+)"', FILES[name])]
    return found


def test_vendored_files_name_their_version_and_have_their_licence() -> None:
    assert "marked v18.2.1" in FILES["vendor/marked.js"]
    assert "DOMPurify 3.5.0" in FILES["vendor/dompurify.js"]
    for name in FILES:
        if name.startswith("vendor/") and name.endswith(".js"):
            assert name.replace(".js", ".LICENSE") in FILES
