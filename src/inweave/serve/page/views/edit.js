import { html } from "../lib/dom.js";
import { t } from "../strings.js";
import { Empty } from "../ui/empty.js";

export const View = () => html`<${Empty} name="edit" title=${t.nav.edit} />`;
