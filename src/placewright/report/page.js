"use strict";
/* Draws the report from the JSON in the page. Names come from users: into the DOM they go as text,
   into Plotly, which understands some HTML, only through esc(). */
(() => {
const D = JSON.parse(document.getElementById("data").textContent);
const RUNS = D.runs, TWO = RUNS.length > 1;
const page = document.getElementById("page");

/* --- small helpers -------------------------------------------------------------------------- */
const esc = s => String(s).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") node.style.cssText = value;
    else node.setAttribute(key, value);
  }
  node.append(...children.filter(c => c !== null && c !== undefined));
  return node;
};
const seconds = s => s === null || s === undefined ? "–"
  : s >= 1 ? s.toFixed(3) + " s" : s >= 1e-3 ? (s * 1e3).toFixed(2) + " ms" : (s * 1e6).toFixed(1) + " µs";
const bytes = b => {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (b < 1000) return (unit === "B" ? b.toFixed(0) : Number(b.toPrecision(3))) + " " + unit;
    b /= 1000;
  }
  return Number(b.toPrecision(3)) + " TB";
};
const count = (n, noun) => n.toLocaleString("en") + " " + noun + (n === 1 ? "" : "s");
const percent = x => (100 * x).toFixed(Math.abs(x) < 0.0995 ? 1 : 0) + "%";
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/* Paul Tol's "vibrant" and "bright" schemes, told apart with any kind of colour blindness. */
const HUES = ["#0077bb", "#ee7733", "#009988", "#ee3377", "#33bbee", "#ddaa33", "#aa4499", "#999933", "#7a68c9", "#88ccaa"];
const GREYS = ["#87909c", "#b0b7c1", "#5f6874"];
const colours = run => {
  let hues = 0, greys = 0;
  return run.devices.map(d => d.type === "cpu" ? GREYS[greys++ % 3] : HUES[hues++ % HUES.length]);
};
const runColour = i => css(i === 0 ? "--accent" : "--second");
const shade = (hex, amount) => {
  const towards = document.documentElement.dataset.theme === "dark" ? 0 : 255;
  return "#" + [1, 3, 5].map(i => {
    const value = parseInt(hex.slice(i, i + 2), 16);
    return Math.round(value + (towards - value) * amount).toString(16).padStart(2, "0");
  }).join("");
};
/* Time axes: seconds or milliseconds, whichever reads better. */
const timeUnit = most => most >= 2 ? [1, "s"] : most >= 2e-3 ? [1e3, "ms"] : [1e6, "µs"];

/* --- Plotly --------------------------------------------------------------------------------- */
const drawn = [];          /* functions that draw, called again when the theme changes */
const layout = more => {
  const axis = {gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"),
                tickfont: {size: 12, color: css("--soft")}, automargin: true,
                title: {font: {size: 12, color: css("--faint")}, standoff: 8}};
  const result = {
    font: {family: getComputedStyle(document.body).fontFamily, size: 12.5, color: css("--soft")},
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    margin: {l: 8, r: 12, t: 8, b: 8}, showlegend: false,
    hoverlabel: {bgcolor: css("--ink"), bordercolor: css("--ink"), align: "left",
                 font: {color: css("--panel"), size: 12.5}},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: css("--faint"), activecolor: css("--ink")}, ...more,
  };
  for (const key of Object.keys(result)) {
    if (/^[xy]axis/.test(key)) {
      result[key] = {...axis, ...result[key], title: {...axis.title, ...(result[key].title || {})}};
    }
  }
  return result;
};
/* Nothing leaves the page: Plotly's button that uploads a chart is taken out. */
const config = {displaylogo: false, responsive: true, doubleClick: "reset", showSendToCloud: false, plotlyServerURL: "",
                modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "sendChartToCloud"]};
const plot = (parent, height, draw, more = {}) => {
  const box = el("div", {style: `height:${height}px`});
  parent.append(box);
  drawn.push(() => {
    const {data, ...rest} = draw();
    return Plotly.react(box, data, layout(rest), {...config, ...more});
  });
  return box;
};
const ALSO = "<extra></extra>";

/* --- frame ---------------------------------------------------------------------------------- */
const links = el("nav");
const section = (id, title, note, parent = page) => {
  const head = el("div", {class: "head"}, el("h2", {}, title), el("p", {class: "note"}, note));
  const node = el("section", {id}, head);
  parent.append(node);
  return {node, head};
};
const linked = (id, title) => links.append(el("a", {href: "#" + id}, title));
const switcher = (head, names, choose) => {
  const buttons = names.map((name, i) => el("button", {
    type: "button", "aria-pressed": String(i === 0),
    onclick: () => {
      buttons.forEach((b, j) => b.setAttribute("aria-pressed", String(i === j)));
      choose(i);
    }}, name));
  head.append(el("div", {class: "switch"}, ...buttons));
};
const legend = (run, extra = []) => el("div", {class: "legend"},
  ...run.devices.map((d, i) => el("span", {}, el("i", {style: `background:${colours(run)[i]}`}), d.name)), ...extra);
/* Two machines with the same devices share a legend. */
const SAME = RUNS.every(run => run.devices.map(d => d.name).join("\n") === RUNS[0].devices.map(d => d.name).join("\n"));
const each = (parent, make) => {
  if (!TWO) { make(RUNS[0], parent, 0); return; }
  const pair = el("div", {class: "pair"});
  parent.append(pair);
  RUNS.forEach((run, i) => {
    const half = el("div", {}, el("h3", {}, run.name));
    pair.append(half);
    make(run, half, i);
  });
};

const themeButton = el("button", {type: "button", id: "theme", onclick: () => {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  setTheme(next);
  try { localStorage.setItem("placewright-theme", next); } catch { /* files may have no storage */ }
  redraw();
}});
const setTheme = theme => {
  document.documentElement.dataset.theme = theme;
  themeButton.textContent = theme === "dark" ? "Light" : "Dark";
};
const redraw = () => Promise.all(drawn.map(draw => draw()));

/* --- answer --------------------------------------------------------------------------------- */
const answer = () => {
  page.append(el("header", {}, el("div", {class: "brand"}, "Placewright", el("span", {}, "placement report")), links, themeButton));
  const heroes = el("div", {class: "heroes", id: "answer"});
  page.append(heroes);
  RUNS.forEach((run, i) => {
    const eyebrow = el("div", {class: "eyebrow"});
    if (TWO) eyebrow.append(el("i", {style: `background:${i ? "var(--second)" : "var(--accent)"}`}), run.name + " · ");
    eyebrow.append(`${run.model} on ${run.cluster}`);
    const headline = run.step === null ? el("h1", {}, "Nothing ran")
      : el("h1", {}, seconds(run.step), el("small", {}, " per step" + (run.measured ? ", measured" : ", simulated")));
    heroes.append(el("div", {class: "hero"}, eyebrow, headline, el("p", {class: "answer"}, run.answer),
      ...(run.basis ? [el("p", {class: "basis"}, run.basis)] : []),
      el("div", {class: "tiles"}, ...run.tiles.map(t =>
        el("div", {class: "tile"}, el("b", {}, t.value), el("span", {}, t.label), el("em", {}, t.note))))));
  });
};

const comparison = () => {
  if (!TWO) return;
  linked("compare", "Compare");
  const {node} = section("compare", "Side by side", D.compare.note);
  const table = el("table", {}, el("tr", {}, el("th", {}, ""), ...RUNS.map(r => el("th", {}, r.name)), el("th", {}, "difference")));
  for (const row of D.compare.rows) {
    const kind = row.better === 0 ? "" : row.better > 0 ? "good" : "bad";
    table.append(el("tr", {}, el("td", {}, row.label), ...row.values.map(v => el("td", {}, v)), el("td", {class: kind}, row.difference)));
  }
  node.append(table);
};

/* --- methods and progress ------------------------------------------------------------------- */
const methods = () => {
  linked("methods", "Methods");
  const {node} = section("methods", "Every method", RUNS.some(run => run.step !== null) ? "Step time of the best placement each one found." + (RUNS.some(run => run.bound > 0) ? " The dashed line is a lower bound that no placement can beat." : "") : "None found a placement that runs.");
  const ran = run => run.methods.filter(m => m.seconds !== null);
  const names = [...new Set(RUNS.flatMap(run => ran(run).map(m => m.method)))];
  const time = name => Math.min(...RUNS.flatMap(r => ran(r).filter(m => m.method === name).map(m => m.seconds)));
  names.sort((a, b) => time(a) - time(b));
  if (names.length) plot(node, 60 + (TWO ? 44 : 31) * names.length, () => {
    const most = Math.max(...RUNS.flatMap(r => ran(r).map(m => m.seconds)), 1e-12);
    const [scale, unit] = timeUnit(most);
    const data = RUNS.map((run, i) => {
      const rows = ran(run);
      const fastest = Math.min(...rows.map(m => m.seconds));
      return {
        type: "bar", orientation: "h", name: esc(run.name), y: rows.map(m => m.method), x: rows.map(m => m.seconds * scale),
        marker: {color: rows.map(m => TWO || m.seconds === fastest ? runColour(i) : css("--bar")), cornerradius: 3},
        text: rows.map(m => `  ${seconds(m.seconds)}` + (run.single ? `  ·  ${(run.single / m.seconds).toFixed(2)}×` : "")),
        textposition: "outside", cliponaxis: false, textfont: {color: css("--soft")},
        customdata: rows.map(m => `<b>${esc(m.method)}</b><br>${seconds(m.seconds)} per step<br>${count(m.trials, "trial")}` + (m.search === null ? "" : ` in ${m.search.toFixed(1)} s`)),
        hovertemplate: "%{customdata}" + ALSO,
      };
    });
    const shapes = RUNS.map((run, i) => ({visible: run.bound > 0, type: "line", x0: run.bound * scale, x1: run.bound * scale, yref: "paper", y0: 0, y1: 1,
      line: {color: TWO ? runColour(i) : css("--ink"), width: 1.2, dash: "dot"}}));
    return {data, shapes, barmode: "group", bargap: 0.32, margin: {l: 8, r: 110, t: 8, b: 8},
      xaxis: {title: {text: `time of one step (${unit})`}, rangemode: "tozero", fixedrange: true},
      yaxis: {categoryorder: "array", categoryarray: names, autorange: "reversed", fixedrange: true, gridcolor: "rgba(0,0,0,0)"}};
  });
  const without = RUNS.flatMap(run => run.methods.filter(m => m.seconds === null).map(m => [run, m]));
  if (without.length) {
    node.append(el("ul", {class: "failed"}, ...without.map(([run, m]) =>
      el("li", {}, `${TWO ? run.name + ", " : ""}${m.method}: ${m.outcome}${m.reason ? " – " + m.reason : ""}`))));
  }
};

const progress = () => {
  if (!RUNS.some(run => run.progress.length)) return;
  linked("search", "Search");
  const {node, head} = section("search", "Best so far", TWO ? "The best placement of each run as the search went on." : "How each method's best placement improved as the search went on.");
  let by = 0;
  const chart = plot(node, 340, () => {
    const data = [];
    const [scale, unit] = timeUnit(Math.max(...RUNS.flatMap(run => [...run.progress.flatMap(line => line.points), ...run.overall]).map(p => p[2]), 1e-12));
    RUNS.forEach((run, i) => {
      const lines = TWO ? [{placer: run.name, points: run.overall}].filter(line => line.points.length) : run.progress;
      /* Methods that search are lines and get the clearest colours; the others are points. */
      const order = [...lines].sort((a, b) => b.points.length - a.points.length);
      for (const line of lines) {
        const colour = TWO ? runColour(i) : HUES[order.indexOf(line) % HUES.length];
        const last = line.points[line.points.length - 1];
        const points = line.points.length > 1 || TWO ? [...line.points, [run.trials, run.searchSeconds, last[2]]] : line.points;
        data.push({type: "scatter", mode: points.length > 1 ? "lines" : "markers", name: esc(line.placer),
          x: points.map(p => by === 0 ? p[0] : Math.max(p[1], 1e-3)), y: points.map(p => p[2] * scale),
          line: {shape: "hv", width: 2.2, color: colour}, marker: {size: 9, color: colour, symbol: "diamond"},
          customdata: points.map(p => `<b>${esc(line.placer)}</b><br>${seconds(p[2])} after ${count(p[0], "trial")}, ${p[1].toFixed(2)} s`),
          hovertemplate: "%{customdata}" + ALSO});
      }
    });
    return {data, showlegend: true, legend: {orientation: "h", y: -0.22, font: {size: 12.5}, itemwidth: 30}, margin: {l: 8, r: 12, t: 8, b: 30},
      xaxis: {type: "log", title: {text: by === 0 ? "trials" : "seconds of search"}, dtick: 1},
      yaxis: {type: "log", title: {text: `step time (${unit})`}, tickformat: ".3~s", nticks: 8}};
  });
  chart.id = "progress-chart";
  switcher(head, ["by trials", "by seconds"], choice => { by = choice; redraw(); });
};

const learning = () => {
  if (!RUNS.some(run => run.metrics.length)) return;
  linked("learning", "Learning");
  const {node} = section("learning", "The learned placer", "Reward (minus the square root of the step time: higher is better), entropy of the policy and share of the placements that failed, at each update.");
  plot(node, 300, () => {
    const data = [], parts = [["reward_mean", "reward"], ["entropy", "entropy"], ["failure_share", "share that failed"]];
    RUNS.forEach((run, i) => run.metrics.forEach((line, k) => parts.forEach(([key], p) => data.push({
      type: "scatter", mode: "lines", name: esc(line.placer), showlegend: p === 0 && (TWO || run.metrics.length > 1), legendgroup: `${i} ${k}`,
      x: line.update, y: line[key], xaxis: "x" + (p + 1), yaxis: "y" + (p + 1),
      line: {width: 1.8, color: TWO ? runColour(i) : HUES[k % HUES.length]},
      hovertemplate: `update %{x}<br>${parts[p][1]} %{y:.4g}` + ALSO}))));
    const axes = {};
    parts.forEach(([, title], p) => {
      const left = p * 0.345;
      axes["xaxis" + (p + 1)] = {domain: [left, left + 0.29], title: {text: "update"}, anchor: "y" + (p + 1)};
      axes["yaxis" + (p + 1)] = {anchor: "x" + (p + 1), title: {text: title}};
    });
    Object.assign(axes.yaxis3, {range: [0, 1], tickformat: ".0%"});
    return {data, showlegend: true, legend: {orientation: "h", y: -0.3}, ...axes};
  });
};

/* --- graph of groups ------------------------------------------------------------------------ */
const curve = (x0, y0, x1, y1) => {
  const xs = [], ys = [], steps = 10;
  for (let i = 0; i <= steps; i++) {
    const t = i / steps, s = t * t * (3 - 2 * t);
    xs.push(x0 + (x1 - x0) * t);
    ys.push(y0 + (y1 - y0) * s);
  }
  xs.push(null); ys.push(null);
  return [xs, ys];
};
const graphs = () => {
  if (!RUNS.some(run => run.graph)) return;
  linked("graph", "Graph");
  const {node, head} = section("graph", "What sits where", "Groups from input to output, larger ones take longer. Coloured lines cross devices. Drag to move, Ctrl + wheel to zoom, double-click to see all.");
  let lanes = false;
  switcher(head, ["by structure", "by device"], choice => { lanes = choice === 1; redraw(); });
  const wire = () => [el("span", {}, el("i", {class: "wire"}), "stays on its device")];
  if (SAME) node.append(legend(RUNS[0], wire()));
  const explorer = el("div", {class: "explorer"});
  const plots = el("div");
  node.append(explorer);
  explorer.append(plots);
  const views = [];
  each(plots, (run, parent, i) => {
    if (!run.graph) { parent.append(el("p", {class: "note"}, "No placement to show.")); return; }
    if (!SAME) parent.append(legend(run, wire()));
    const g = run.graph, hues = colours(run), ops = D.graphs[g.ops];
    const view = {run, matches: null, selected: -1};
    const layers = Math.max(...g.layer) + 1;
    const most = Math.max(...g.seconds, 1e-12);
    const largest = Math.min(34, Math.max(11, 1500 / layers / (TWO ? 2 : 1)));
    const sizes = g.seconds.map(s => 5 + (largest - 5) * Math.sqrt(s / most));
    const box = plot(parent, 540, () => {
      const y = lanes ? g.lane : g.height.map(h => -h);
      const groups = new Map();
      const middle = {x: [], y: [], text: []};
      const heaviest = Math.max(...g.edges.map(e => e[2] + e[3]), 1);
      for (const [a, b, there, back, tensors] of g.edges) {
        const crossing = g.device[a] !== g.device[b];
        const weight = crossing ? (there + back > heaviest / 10 ? 2.4 : there + back > heaviest / 300 ? 1.5 : 0.9) : 0.8;
        const key = crossing ? `${g.device[a]} ${weight}` : "-";
        if (!groups.has(key)) groups.set(key, {x: [], y: [], crossing, device: g.device[a], weight});
        const line = groups.get(key);
        const [xs, ys] = curve(g.layer[a], y[a], g.layer[b], y[b]);
        line.x.push(...xs); line.y.push(...ys);
        if (crossing) {
          middle.x.push((g.layer[a] + g.layer[b]) / 2);
          middle.y.push((y[a] + y[b]) / 2);
          const device = k => esc(run.devices[g.device[k]].name);
          middle.text.push(`<b>${device(a)} → ${device(b)}: ${bytes(there)}</b>` + (back ? `<br>${device(b)} → ${device(a)}: ${bytes(back)}` : "")
            + `<br>${esc(g.names[a])} – ${esc(g.names[b])}<br>${count(tensors, "tensor")}`);
        }
      }
      const dim = view.matches !== null;
      const faint = Math.max(0.3, Math.min(1, 350 / g.edges.length));  /* many lines, each the fainter */
      const data = [...groups.values()].sort((p, q) => p.crossing - q.crossing).map(line => ({
        type: "scatter", mode: "lines", x: line.x, y: line.y, hoverinfo: "skip",
        line: {width: line.weight, color: line.crossing ? hues[line.device] : css("--edge")}, opacity: (line.crossing ? 0.68 : 0.6) * faint * (dim ? 0.3 : 1)}));
      data.push({type: "scatter", mode: "markers", x: middle.x, y: middle.y, marker: {size: 9, opacity: 0}, customdata: middle.text,
        hovertemplate: "%{customdata}" + ALSO});
      const lit = k => !dim || view.matches.has(k);
      data.push({type: "scatter", mode: g.names.length <= 24 ? "markers+text" : "markers", meta: "groups", x: g.layer, y,
        text: g.names.length <= 24 ? g.names.map(esc) : undefined, textposition: "bottom center", textfont: {size: 11},
        marker: {size: sizes, color: g.device.map(d => hues[d]), opacity: g.names.map((_, k) => lit(k) ? 1 : 0.13),
                 line: {width: g.names.map((_, k) => k === view.selected ? 3 : 1), color: g.names.map((_, k) => k === view.selected ? css("--ink") : css("--panel"))}},
        customdata: g.names.map((name, k) => `<b>${esc(name)}</b><br>${esc(run.devices[g.device[k]].name)}, ${seconds(g.seconds[k])} of computing<br>${count(g.counts[k], "op")}` + (g.resident[k] ? `, ${bytes(g.resident[k])} of variables` : "")),
        hovertemplate: "%{customdata}" + ALSO});
      const lo = Math.min(...y), hi = Math.max(...y), room = (hi - lo) * 0.07 || 1;
      return {data, dragmode: "pan", uirevision: String(lanes), margin: {l: 4, r: 4, t: 4, b: 4},
        xaxis: {visible: false, range: [-layers * 0.03 - 0.5, layers * 1.03 - 0.5]},
        yaxis: lanes ? {tickvals: run.graph.lanes.map(l => l[1]), ticktext: run.graph.lanes.map(l => esc(l[0])), zeroline: false, showgrid: false, range: [lo - room, hi + room]}
                     : {visible: false, range: [lo - room, hi + room]}};
    }, {scrollZoom: true});
    box.id = "graph-" + i;
    box.dataset.panel = "graph";
    /* Without Ctrl the wheel scrolls the page, as readers expect. */
    box.addEventListener("wheel", event => { if (!event.ctrlKey && !event.metaKey) event.stopPropagation(); }, {capture: true});
    view.select = group => { view.selected = group; show(view, group, ops); redrawGraphs(); };
    view.draw = drawn[drawn.length - 1];
    view.listen = () => box.on("plotly_click", event => {
      const point = event.points.find(p => p.data.meta === "groups");
      if (point) view.select(point.pointNumber);
    });
    view.ops = ops;
    views.push(view);
  });
  const redrawGraphs = () => views.forEach(view => view.draw());
  const input = el("input", {type: "search", id: "search-ops", placeholder: "Search ops and groups", "aria-label": "Search ops and groups"});
  const found = el("div", {class: "count", id: "search-count"}), list = el("ul", {class: "list", id: "op-list"});
  const detail = el("div", {class: "detail", id: "group-detail"});
  explorer.append(el("aside", {}, input, detail, found, list));
  const show = (view, group, ops) => {
    const g = view.run.graph, members = [];
    ops.group.forEach((k, op) => { if (k === group) members.push(op); });
    const own = op => g.opSeconds[op];
    members.sort((a, b) => own(b) - own(a));
    detail.replaceChildren(el("h3", {}, g.names[group]), el("p", {}, `${TWO ? view.run.name + ": " : ""}on ${view.run.devices[g.device[group]].name}, ${seconds(g.seconds[group])} of computing, ${count(members.length, "op")}`
      + (g.resident[group] ? `, ${bytes(g.resident[group])} of variables` : "")));
    found.textContent = "Its ops, longest first";
    const shown = members.slice(0, 400);
    list.replaceChildren(...shown.map(op => el("li", {}, ops.names[op], el("small", {}, `${ops.types[ops.type[op]]} · ${seconds(own(op))}`))));
    if (members.length > shown.length) list.append(el("li", {}, `… and ${count(members.length - shown.length, "more op")}`));
  };
  const hint = () => {
    detail.replaceChildren();
    found.textContent = "Click a group to see its ops.";
    list.replaceChildren();
  };
  const search = () => {
    const text = input.value.trim().toLowerCase();
    if (!text) { views.forEach(view => { view.matches = null; view.selected = -1; }); hint(); redrawGraphs(); return; }
    detail.replaceChildren();
    let first = null;
    views.forEach(view => {
      const g = view.run.graph, hits = [];
      view.matches = new Set();
      view.ops.names.forEach((name, op) => {
        if (name.toLowerCase().includes(text)) { hits.push(op); view.matches.add(view.ops.group[op]); }
      });
      g.names.forEach((name, k) => { if (name.toLowerCase().includes(text)) view.matches.add(k); });
      if (first === null) first = [view, hits];
    });
    const [view, hits] = first;
    found.textContent = `${count(hits.length, "op")} in ${count(view.matches.size, "group")}`;
    list.replaceChildren(...hits.slice(0, 200).map(op => {
      const group = view.ops.group[op];
      return el("li", {class: "hit", onclick: () => view.select(group)}, view.ops.names[op],
        el("small", {}, `${view.run.devices[view.run.graph.device[group]].name} · ${view.run.graph.names[group]}`));
    }));
    redrawGraphs();
  };
  let waiting = 0;
  input.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(search, 120); });
  hint();
  afterwards.push(() => views.forEach(view => view.listen()));
};
const afterwards = [];

/* --- timeline and memory -------------------------------------------------------------------- */
const timelines = () => {
  if (!RUNS.some(run => run.gantt)) return;
  linked("timeline", "Timeline");
  const {node} = section("timeline", "One step, moment by moment", (RUNS.some(run => run.measured) ? "As simulated, also where step times were measured: see the top of the page. " : "") + "Ops on their devices, transfers on their links (coloured by where they come from). Drag to zoom in, double-click to zoom out.");
  const path = () => [el("span", {}, el("i", {class: "path"}), "critical path: what the step waits for")];
  if (SAME) node.append(legend(RUNS[0], path()));
  const longest = Math.max(...RUNS.map(run => run.gantt ? run.gantt.step : 0));
  const [scale, unit] = timeUnit(longest);
  const boxes = [];
  RUNS.forEach((run, i) => {
    if (!run.gantt) return;
    if (TWO) node.append(el("h3", {}, run.name));
    if (!SAME) node.append(legend(run, path()));
    const t = run.gantt, hues = colours(run), D_ = run.devices.length;
    const box = plot(node, 70 + 27 * t.rows.length, () => {
      const data = [];
      const bars = (rows, colour, text) => data.push({type: "bar", orientation: "h", y: rows.map(r => r[0]), base: rows.map(r => r[1] * scale), x: rows.map(r => r[2] * scale),
        width: 0.74, marker: {color: rows.map(colour), line: {width: 0}}, customdata: rows.map(text), hovertemplate: "%{customdata}" + ALSO});
      const when = r => `${seconds(r[2])}, from ${seconds(r[1])}`;
      bars(t.ops, (r, k) => shade(hues[t.rows[r[0]].device], k % 2 ? 0.22 : 0),
        r => `<b>${r[3] < 0 ? "several groups" : esc(run.graph.names[r[3]])}</b><br>${count(r[4], "op")} on ${esc(t.rows[r[0]].label)}<br>${when(r)}`);
      bars(t.transfers, r => r[3] < 0 ? css("--bar") : hues[Math.floor(r[3] / D_)],
        r => `<b>${r[3] < 0 ? "several" : esc(run.devices[Math.floor(r[3] / D_)].name) + " → " + esc(run.devices[r[3] % D_].name)}</b><br>${count(r[4], "transfer")}, ${bytes(r[5])}<br>${when(r)}`);
      const stay = {x: [], y: []}, move = {x: [], y: []};
      t.path.forEach(([row, start, end]) => {
        stay.x.push(start * scale, end * scale, null); stay.y.push(row + 0.44, row + 0.44, null);
        move.x.push(start * scale, end * scale); move.y.push(row + 0.44, row + 0.44);
      });
      data.push({type: "scatter", mode: "lines", ...move, line: {color: css("--ink"), width: 1}, opacity: 0.4, hoverinfo: "skip"});
      data.push({type: "scatter", mode: "lines", ...stay, line: {color: css("--ink"), width: 2.6}, hoverinfo: "skip"});
      const firstLink = t.rows.findIndex(r => r.device < 0);
      return {data, barmode: "overlay", bargap: 0, uirevision: "gantt",
        shapes: firstLink > 0 ? [{type: "line", xref: "paper", x0: 0, x1: 1, y0: firstLink - 0.5, y1: firstLink - 0.5, line: {color: css("--line"), width: 1}}] : [],
        xaxis: {range: [0, longest * scale * 1.005], title: {text: `time (${unit})`}, zeroline: false},
        yaxis: {range: [t.rows.length - 0.4, -0.6], tickvals: t.rows.map((_, k) => k), ticktext: t.rows.map(r => esc(r.label)), fixedrange: true, showgrid: false, zeroline: false}};
    });
    box.id = "gantt-" + i;
    boxes.push(box);
  });
  linked("memory", "Memory");
  const memory = section("memory", "Memory over the step", "Share of each device's memory in use. Above the line it would not run.");
  each(memory.node, (run, parent, i) => {
    if (!run.memory) return;
    const hues = colours(run);
    const box = plot(parent, 300, () => {
      const peak = Math.max(...run.memory.map((m, d) => Math.max(...m.bytes) / run.devices[d].memory));
      const data = run.memory.map((m, d) => ({type: "scatter", mode: "lines", name: esc(run.devices[d].name), x: m.seconds.map(s => s * scale),
        y: m.bytes.map(b => 100 * b / run.devices[d].memory), line: {shape: "hv", width: 1.8, color: hues[d]},
        customdata: m.bytes.map(b => `<b>${esc(run.devices[d].name)}</b><br>${bytes(b)} of ${bytes(run.devices[d].memory)}`), hovertemplate: "%{customdata} at %{x:.4g} " + unit + ALSO}));
      return {data, uirevision: "memory", showlegend: true, legend: {orientation: "h", y: -0.24}, margin: {l: 8, r: 12, t: 14, b: 30},
        shapes: [{type: "line", xref: "paper", x0: 0, x1: 1, y0: 100, y1: 100, line: {color: css("--bad"), width: 1.4, dash: "dash"}}],
        annotations: [{xref: "paper", x: 1, y: 100, xanchor: "right", yanchor: "bottom", text: "limit", showarrow: false, font: {color: css("--bad"), size: 12}}],
        xaxis: {range: [0, longest * scale * 1.005], title: {text: `time (${unit})`}, zeroline: false},
        yaxis: {range: [0, Math.max(108, 108 * peak)], ticksuffix: "%", fixedrange: true}};
    });
    box.id = "memory-" + i;
    boxes.push(box);
  });
  /* Zooming one zooms all. */
  afterwards.push(() => boxes.forEach(box => box.on("plotly_relayout", event => {
    const range = event["xaxis.range[0]"] !== undefined ? [event["xaxis.range[0]"], event["xaxis.range[1]"]] : event["xaxis.range"];
    if (!range || event.linked) return;
    boxes.filter(other => other !== box).forEach(other => Plotly.relayout(other, {"xaxis.range": [...range], linked: true}));
  })));
};

/* --- load and what next --------------------------------------------------------------------- */
const loads = () => {
  const sets = TWO ? RUNS.map((run, i) => [run.name, run.load, i]).filter(set => set[1])
    : RUNS[0].load ? [["this placement", RUNS[0].load, 0], ...(RUNS[0].expertLoad ? [["expert", RUNS[0].expertLoad, 1]] : [])] : [];
  if (!sets.length) return;
  linked("load", "Load");
  const {node} = section("load", "Load of the devices", TWO ? "What each device does in a step." : "What each device does in a step, this placement against the expert's. Copies overlap with computing.");
  const devices = [...new Set(RUNS.flatMap(run => run.devices.map(d => d.name)))];
  const names = run => run.devices.map(d => esc(d.name));
  plot(node, 90 + 40 * devices.length, () => {
    const [scale, unit] = timeUnit(Math.max(...sets.flatMap(s => s[1].flat())));
    const titles = ["computing", "copying", "idle"], data = [], axes = {};
    sets.forEach(([name, rows, k], s) => titles.forEach((title, p) => data.push({
      type: "bar", orientation: "h", name: esc(name), legendgroup: name, showlegend: p === 0, offsetgroup: String(s),
      y: names(RUNS[TWO ? k : 0]), x: rows.map(r => r[p] * scale), xaxis: "x" + (p + 1), yaxis: "y",
      marker: {color: k === 0 ? css("--accent") : TWO ? css("--second") : css("--bar"), cornerradius: 2},
      customdata: rows.map(r => seconds(r[p])), hovertemplate: `<b>%{y}</b>, ${esc(name)}<br>${title} %{customdata}` + ALSO})));
    titles.forEach((title, p) => { axes["xaxis" + (p + 1)] = {domain: [p * 0.345, p * 0.345 + 0.31], title: {text: `${title} (${unit})`}, rangemode: "tozero", fixedrange: true}; });
    return {data, barmode: "group", bargap: 0.35, showlegend: true, legend: {orientation: "h", y: 1.12, x: 0, traceorder: "normal"}, margin: {l: 8, r: 12, t: 24, b: 8},
      ...axes, yaxis: {autorange: "reversed", fixedrange: true, gridcolor: "rgba(0,0,0,0)"}};
  });
};

const whatIfs = () => {
  if (!RUNS.some(run => run.whatIfs.length)) return;
  linked("next", "What next");
  const {node} = section("next", "What would help next", "The same model on a machine that is better in one respect: simulated, each with a short search from this placement. The first row changes nothing, so what it gains comes from searching alone.");
  each(node, (run, parent) => {
    if (!run.whatIfs.length) return;
    const rows = run.whatIfs.filter(w => w.seconds !== null), control = rows[0];
    const box = plot(parent, 70 + 44 * rows.length, () => {
      const [scale, unit] = timeUnit(Math.max(...rows.map(w => w.seconds)));
      const label = w => w === control ? "   " + seconds(w.seconds) : `   ${seconds(w.seconds)}  ·  ${w.seconds < control.seconds * 0.9995 ? "−" + percent(1 - w.seconds / control.seconds) : "no gain"}`;
      return {data: [
        {type: "bar", orientation: "h", y: rows.map(w => esc(w.change)), x: rows.map(w => w.seconds * scale), width: 0.55,
          marker: {color: rows.map(w => w !== control && w.seconds < control.seconds * 0.9995 ? css("--accent") : css("--bar")), cornerradius: 3},
          text: rows.map(label), textposition: "outside", cliponaxis: false,
          customdata: rows.map(w => `<b>${esc(w.change)}</b>: ${esc(w.detail)}<br>${seconds(w.seconds)} after a short search<br>${w.same === null ? "this placement does not run there" : seconds(w.same) + " with this placement"}<br>lower bound ${seconds(w.bound)}`),
          hovertemplate: "%{customdata}" + ALSO},
        {type: "scatter", mode: "markers", y: rows.map(w => esc(w.change)), x: rows.map(w => w.same === null ? null : w.same * scale), hoverinfo: "skip",
          marker: {symbol: "line-ns", size: 17, line: {width: 2, color: css("--ink")}}}],
        margin: {l: 8, r: 130, t: 8, b: 8}, xaxis: {rangemode: "tozero", title: {text: `time of one step (${unit}); the tick is the placement as it is`}, fixedrange: true},
        yaxis: {autorange: "reversed", fixedrange: true, gridcolor: "rgba(0,0,0,0)"}};
    });
    box.dataset.panel = "what-if";
  });
};

const words = () => {
  linked("why", "Why");
  const {node} = section("why", "Why it is so", "The same as placewright explain says.");
  each(node, (run, parent) => parent.append(el("div", {class: "words"}, ...run.sections.map(([title, lines]) =>
    el("div", {}, el("h3", {}, title), ...lines.map(line => el("p", {}, line)))))));
};

const origin = () => {
  const list = el("dl");
  RUNS.forEach(run => run.origin.forEach(([key, value]) =>
    list.append(el("dt", {}, (TWO ? run.name + ": " : "") + key), el("dd", {}, el("code", {}, value)))));
  page.append(el("footer", {id: "origin"}, "Made by", list));
};

/* --- start ---------------------------------------------------------------------------------- */
const start = async () => {
  let theme = null;
  try { theme = localStorage.getItem("placewright-theme"); } catch { /* files may have no storage */ }
  setTheme(theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  for (const draw of [answer, comparison, methods, progress, learning, graphs, timelines, loads, whatIfs, words, origin]) draw();
  try {
    /* Plotly is compressed: a third of the size, and a moment to unpack. */
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), c => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    await redraw();
    afterwards.forEach(listen => listen());
  } catch (error) {
    page.prepend(el("p", {class: "problem"}, `The charts cannot be drawn in this browser (${error.message}); any from 2023 on can.`));
    throw error;
  }
  document.documentElement.dataset.ready = "true";
};
start();
})();
