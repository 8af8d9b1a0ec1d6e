"""`tba browse`: only permitted readers see its pages, and only reading is possible."""

from html import unescape
from urllib.parse import quote

from flows.pages.browse.guard import Door
from storage.runs.run import Run
from tests.support.flows.site import Site, Whole, serve


def test_every_answer_tells_browsers_to_run_and_fetch_nothing(site: Site):
    for path in ("/", "/nothing", "/refresh"):
        _, headers, _ = site.ask(path)
        policy = headers["content-security-policy"]
        for part in ("default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"):
            assert part in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_only_reading_is_possible(site: Site):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        status, headers, _ = site.ask("/", method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    status, _, body = site.ask("/step/7", "HEAD")
    assert (status, body) == (200, "")


def test_a_name_that_is_not_this_machines_is_refused(site: Site):
    port = site.door.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert site.ask("/", Host=host)[0] == 200
    for host in (
        "example.org",
        f"example.org:{port}",
        "localhost",
        f"localhost:{port + 1}",
        f"127.0.0.1.example.org:{port}",
        "",
    ):
        status, _, body = site.ask("/", Host=host)
        assert status == 421
        assert "first" not in Whole(body).said


def test_a_browser_leaves_out_the_port_of_http():
    assert {"localhost", "localhost:80", "127.0.0.1"} <= Door("127.0.0.1", 80, None, True).names
    assert "localhost" not in Door("127.0.0.1", 8080, None, True).names


def test_another_site_can_link_here_and_nothing_else(site: Site):
    crossed = {"Sec-Fetch-Site": "cross-site"}
    assert site.ask("/", **crossed, **{"Sec-Fetch-Mode": "navigate"})[0] == 200
    assert site.ask("/", **crossed, **{"Sec-Fetch-Mode": "no-cors"})[0] == 403
    assert site.ask("/refresh", **crossed, **{"Sec-Fetch-Mode": "navigate"})[0] == 403


def test_sql_of_another_sites_link_is_shown_and_not_run(site: Site):
    own = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Site": "same-origin"}
    for page, wrote in (
        (site.link("/sql", query="select 7000000 + 777777 as found"), "select 7000000 + 777777 as found"),
        (site.link("/trajectories", where="reward > -99"), "reward > -99"),
    ):
        for foreign in ("cross-site", "same-site"):  # another port of this machine counts as the same site
            status, _, body = site.ask(page, **{**own, "Sec-Fetch-Site": foreign})
            assert status == 200 and wrote in unescape(body) and "press the button" in body
            assert "7777777" not in body.replace(",", "") and "/trajectory/" not in body
        for sent in (own, {}):
            assert "press the button" not in site.ask(page, **sent)[2]
    assert "7777777" in site.ask(site.link("/sql", query="select 7000000 + 777777 as found"), **own)[2].replace(",", "")


def test_beyond_this_machine_a_token_is_asked_for(finished: Run):
    with serve(finished, host="0.0.0.0") as site:
        token = site.door.token
        assert token
        assert len(token) > 40
        assert token in site.door.address
        cookie = f"{site.door.cookie}={token}"
        for path, headers in (
            ("/", {}), ("/?token=", {}), (f"/?token={token[:-1]}", {}), (f"/?token={quote('é')}", {}),
            ("/", {"Cookie": f"{site.door.cookie}="}), ("/", {"Cookie": f"{site.door.cookie}=\"x"}),
            ("/", {"Cookie": "a b;;="}),
        ):  # fmt: skip
            status, got, body = site.ask(path, **headers)
            assert status == 403
            assert "set-cookie" not in got
            assert "first" not in Whole(body).said
        status, got, body = site.ask(f"/step/7?token={token}&attempt=2")
        assert got["set-cookie"].startswith(f"{cookie};")
        assert "httponly" in got["set-cookie"].lower()
        assert "samesite=strict" in got["set-cookie"].lower()
        assert "0;url=/step/7?attempt=2" in body
        assert "Step" not in body
        assert site.ask("/step/7", Cookie=f"other=1; {cookie}", Host="machine.example.org")[0] == 200
        assert token not in site.ask("/", Cookie=cookie)[2]


def test_a_token_can_be_asked_for_on_this_machine_too(finished: Run):
    with serve(finished, with_token=True) as site:
        assert site.ask("/")[0] == 403
        assert site.ask(f"/?token={site.door.token}", Host="example.org")[0] == 421
